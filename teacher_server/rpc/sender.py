"""What goes to a reader that may be slow: messages, under flow control with a time limit, and sequences.

A message costs both sides more than the bytes of a short response, so if the reader accepts batches, small messages are
held back and sent together, at the latest when the call has to wait for something.

gRPC cannot withdraw a message that waits for flow control, and refuses to send a status while one waits. So when a
reader takes too long, its call first releases everything that it holds, and the status follows once the message has
left.

A sequence goes to the worker only while the scores that the reader has not taken yet fit into a window, so a slow
reader holds back its own work instead of filling the server's memory.
"""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from opd.errors import DeadlineError, OpdError, UnavailableError
from opd.wire.encoder import batch_response
from opd.wire.request import ParsedRequest
from opd.wire.types import Scores
from teacher_server.batching.admission import Client, Price
from teacher_server.batching.queue import SequenceJob
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import EngineItem

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


class PendingScores:
    """A sequence whose scores a call waits for: links its job on the worker's thread to a future on the event loop."""

    def __init__(self, request: ParsedRequest, index: int, client: Client, deadline: float, price: Price) -> None:
        self.price = price
        self.future: asyncio.Future[tuple[Scores, str]] = asyncio.get_running_loop().create_future()
        # A call that fails on an earlier sequence never awaits the later ones. Reading the exception here keeps asyncio
        # from logging that it was "never retrieved".
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        item = request.items[index]
        engine_item = EngineItem(item, request.spec, request.temperature, lambda: _cancelled(known()))
        self.job = SequenceJob(engine_item, price.tokens, deadline, client, partial(_deliver, self.future))
        # Weak, and a future instead of `self` above: what a job refers to must not refer to the job, or both keep the
        # ids and the scores until a full garbage collection, which may be minutes away.
        known = weakref.ref(self.job)


def _cancelled(job: SequenceJob | None) -> bool:
    return job is None or job.cancelled


def _deliver(
    future: "asyncio.Future[tuple[Scores, str]]", job: SequenceJob, result: Scores | Exception, weights_hash: str
) -> None:
    if future.done():
        return
    if isinstance(result, OpdError):
        future.set_exception(result)
    elif isinstance(result, Exception):
        future.set_exception(
            UnavailableError(f"the engine failed with {type(result).__name__}; the server's log has the cause.")
        )
    else:
        future.set_result((result, weights_hash))


class SendWindow:
    """The sequences of a call that are waiting or being computed, in the order of the response.

    Args:
        worker: the teacher's worker.
        sequences: all sequences of the call.
        window_bytes: bound on the scores that are queued or computed but not yet taken by the reader; one sequence
            always fits.
    """

    def __init__(self, worker: EngineWorker, sequences: Sequence[PendingScores], window_bytes: int) -> None:
        self._worker = worker
        self._waiting = deque(sequences)
        self._computing: deque[PendingScores] = deque()
        self._window = window_bytes
        self._ahead = 0

    def advance(self) -> None:
        """Submits the sequences that fit into the window.

        Raises:
            UnavailableError: if the worker takes no more jobs.
        """
        jobs = []
        while self._waiting:
            size = self._waiting[0].price.reply_bytes
            if self._ahead and self._ahead + size > self._window:
                break
            self._ahead += size
            self._computing.append(self._waiting.popleft())
            jobs.append(self._computing[-1].job)
        if jobs:
            self._worker.submit(jobs)

    def first(self) -> PendingScores:
        """The sequence whose scores are to be sent next."""
        return self._computing[0]

    def drop_first(self) -> PendingScores:
        """Removes and returns the first sequence; it holds its scores, which must not be kept once they are sent."""
        return self._computing.popleft()

    def sent(self, price: Price) -> None:
        """Moves the window on after the reader has taken a sequence of this price."""
        self._ahead -= price.reply_bytes
        self.advance()

    def close(self) -> None:
        """Cancels what has not been computed."""
        self._waiting.clear()
        left = [pending.job for pending in self._computing if not pending.job.ended_at]
        if left:  # cancelling makes the worker search its whole queue, which a call that is done need not wait for
            self._worker.cancel(left)
        self._computing.clear()
