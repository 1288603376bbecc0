"""Sending to a reader that may be slow: flow control with a time limit.

gRPC cannot withdraw a message that waits for flow control, and refuses to send a status while one waits. So when a
reader takes too long, its call first releases everything it holds, and the status follows when the message has left.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from opd.errors import DeadlineError


class Sender:
    """Writes the messages of one call.

    Args:
        write: sends a message and returns when flow control let it pass.
        limit: seconds that one message may wait.
    """

    def __init__(self, write: Callable[[Any], Any], limit: float) -> None:
        self._write = write
        self._limit = limit
        self._stuck: asyncio.Task[Any] | None = None

    async def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            DeadlineError: when the reader did not take it in time.
        """
        # `wait` and not `wait_for`: on a timeout the latter cancels the write, which gRPC cannot do.
        task = asyncio.ensure_future(self._write(message))
        try:
            done, _ = await asyncio.wait((task,), timeout=self._limit)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._stuck = task
            raise DeadlineError(f"the reader took no message for {self._limit:g} s; read faster or ask for less.")
        task.result()

    async def settle(self) -> None:
        """Wait until the message that was stuck has left, so that a status can follow."""
        if self._stuck is not None:
            with contextlib.suppress(Exception):
                await self._stuck
