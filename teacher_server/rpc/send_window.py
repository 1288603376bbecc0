"""The sequences of one call on their way through the engine, never far ahead of the call's reader.

A sequence is handed to the worker only while the scores that the reader has not taken yet stay within a window: a
slow reader holds back its own work, not the server's memory.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from opd.errors import OpdError, UnavailableError
from opd.wire.request import ParsedRequest
from opd.wire.types import Scores
from teacher_server.batching.admission import Price
from teacher_server.batching.client import Client
from teacher_server.batching.queue import SequenceJob
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import EngineItem


class PendingScores:
    """A sequence whose scores a call waits for: ties its job on the worker's thread to a future on the event loop."""

    def __init__(self, request: ParsedRequest, index: int, client: Client, deadline: float, price: Price) -> None:
        self.price = price
        self.future: asyncio.Future[tuple[Scores, str]] = asyncio.get_running_loop().create_future()
        # A call that fails on an earlier sequence never looks at the later ones.
        # Reading the exception here keeps asyncio from logging that it was "never retrieved".
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        item = request.items[index]
        engine_item = EngineItem(item, request.spec, request.temperature, lambda: job.cancelled)
        self.job = job = SequenceJob(engine_item, price.tokens, deadline, client, self._deliver)

    def _deliver(self, job: SequenceJob, result: Scores | Exception, weights_hash: str) -> None:
        # The call keeps its jobs for their times until it ends; through this bound method they would keep the scores.
        job.deliver = _delivered
        if self.future.done():
            return
        if isinstance(result, OpdError):
            self.future.set_exception(result)
        elif isinstance(result, Exception):
            self.future.set_exception(UnavailableError(f"the engine failed: {type(result).__name__}."))
        else:
            self.future.set_result((result, weights_hash))


def _delivered(job: SequenceJob, result: Scores | Exception, weights_hash: str) -> None:
    """Takes the place of `deliver` once it was called."""


class SendWindow:
    """The sequences of one call that are computed or wait, in the order of the answer.

    Args:
        worker: of the teacher.
        sequences: all of the call.
        window_bytes: of scores that are computed or queued and not yet taken by the reader; one sequence always fits.
    """

    def __init__(self, worker: EngineWorker, sequences: Sequence[PendingScores], window_bytes: int) -> None:
        self._worker = worker
        self._waiting = deque(sequences)
        self._computing: deque[PendingScores] = deque()
        self._window = window_bytes
        self._ahead = 0

    def advance(self) -> None:
        """Hand over what fits into the window.

        Raises:
            UnavailableError: when the worker takes no more.
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
        """The sequence whose scores are sent next."""
        return self._computing[0]

    def drop_first(self) -> PendingScores:
        """Remove the first sequence: it holds its scores, which must not outlive their sending."""
        return self._computing.popleft()

    def sent(self, price: Price) -> None:
        """The reader took a sequence: move the window on."""
        self._ahead -= price.reply_bytes
        self.advance()

    def close(self) -> None:
        """Cancel what has not been computed."""
        self._waiting.clear()
        left = [pending.job for pending in self._computing if not pending.job.ended_at]
        if left:  # the worker looks through its whole queue for them: nothing that an answered call should wait for
            self._worker.cancel(left)
        self._computing.clear()
