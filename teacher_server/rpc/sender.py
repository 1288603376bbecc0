"""What goes to a reader that may be slow: messages, under flow control with a time limit.

A message costs both sides more than the bytes of a short response, so if the reader accepts batches, small messages are
held back and sent together, at the latest when the call has to wait for something.

gRPC cannot withdraw a message that waits for flow control, and refuses to send a status while one waits. So when a
reader takes too long, its call first releases everything that it holds, and the status follows once the message has
left.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from opd.errors import DeadlineError
from opd.wire.encoder import batch_response

BATCH_BYTES = 64 * 1024
"""Largest size of a batch; larger messages are sent by themselves."""


class Sender:
    """Writes the messages of a call.

    Args:
        write: sends a message and returns once flow control has let it pass.
        limit: seconds that a message may wait.
        batches: whether the reader accepts batches of score messages.
    """

    def __init__(self, write: Callable[[Any], Any], limit: float, *, batches: bool = False) -> None:
        self._write = write
        self._limit = limit
        self._batches = batches
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._stuck: asyncio.Task[Any] | None = None

    async def send(self, message: Any) -> None:
        """Sends a message, or holds it to be sent with others.

        Raises:
            DeadlineError: if the reader did not take it, or what was held before it, in time.
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
        """Sends what is held; nothing if a message is stuck, because gRPC would not send anything behind it.

        Raises:
            DeadlineError: as for `send`.
        """
        held, self._held, self._held_bytes = self._held, [], 0
        if held and self._stuck is None:
            await self._send(held[0] if len(held) == 1 else batch_response(held))

    async def _send(self, message: Any) -> None:
        # `wait`, not `wait_for`, which on a timeout would cancel the write; gRPC cannot do that.
        task = asyncio.ensure_future(self._write(message))
        # If the call is cancelled just as a write fails, reading the exception keeps asyncio from logging it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait((task,), timeout=self._limit)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._stuck = task
            raise DeadlineError(
                f"the client read no message for {self._limit:g} s; read faster, or ask for fewer sequences at once."
            )
        task.result()

    async def settle(self) -> None:
        """Waits until a message that was stuck has left, so that a status can follow."""
        if self._stuck is not None:
            with contextlib.suppress(Exception):
                await self._stuck
