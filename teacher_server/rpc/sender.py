"""Sending to a reader that may be slow: flow control with a time limit.

Each message costs both sides more than the bytes of a short answer do. So small ones wait for each other and travel
together, where the reader accepts that, until there is something to wait for.

gRPC cannot withdraw a message that waits for flow control, and refuses to send a status while one waits. So when a
reader takes too long, its call first releases everything it holds, and the status follows when the message has left.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from opd.errors import DeadlineError
from opd.wire.encoder import batch_response

BATCH_BYTES = 64 * 1024
"""Messages travel together up to this size; larger ones go by themselves."""


class Sender:
    """Writes the messages of one call.

    Args:
        write: sends a message and returns when flow control let it pass.
        limit: seconds that one message may wait.
        batches: whether the reader accepts several score messages in one.
    """

    def __init__(self, write: Callable[[Any], Any], limit: float, *, batches: bool = False) -> None:
        self._write = write
        self._limit = limit
        self._batches = batches
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._stuck: asyncio.Task[Any] | None = None

    async def send(self, message: Any) -> None:
        """Send one message, or hold it until it is worth sending.

        Raises:
            DeadlineError: when the reader did not take it, or what was held before it, in time.
        """
        if not self._batches:
            await self._send(message)
            return
        data = message if isinstance(message, bytes) else message.SerializeToString()
        if self._held_bytes + len(data) > BATCH_BYTES:
            await self.flush()
        if len(data) > BATCH_BYTES:
            await self._send(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)

    async def flush(self) -> None:
        """Send what is held; nothing where a message is stuck, behind which it would never go out.

        Raises:
            DeadlineError: see `send`.
        """
        held, self._held, self._held_bytes = self._held, [], 0
        if held and self._stuck is None:
            await self._send(held[0] if len(held) == 1 else batch_response(held))

    async def _send(self, message: Any) -> None:
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
