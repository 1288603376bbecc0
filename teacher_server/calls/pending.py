"""The sequences of a call on their way through the worker.

A sequence goes to the worker only while the scores that the reader has not taken yet fit into a window, so a slow
reader holds back its own work instead of filling the server's memory.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

from opd.errors import OpdError, UnavailableError
from opd.wire.request import ParsedRequest
from opd.wire.types import Scores
from teacher_server.batching.admission import Client, Price
from teacher_server.batching.queue import SequenceJob
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import EngineItem


class PendingScores:
    """A sequence whose scores a call waits for: links its job on the worker's thread to a future on the event loop."""

    def __init__(
        self, request: ParsedRequest, index: int, client: Client, deadline: float, price: Price, *, ranks: bool
    ) -> None:
        self.price = price
        self.future: asyncio.Future[tuple[Scores, str]] = asyncio.get_running_loop().create_future()
        # A call that fails on an earlier sequence never awaits the later ones. Reading the exception here keeps asyncio
        # from logging that it was "never retrieved".
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        item = request.items[index]
        engine_item = EngineItem(item, request.spec, request.temperature, lambda: _cancelled(known()), ranks)
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
