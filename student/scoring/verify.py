"""Verification during the rollout: each answer is judged from the moment its row is finished, several at once.

An answer whose check hangs holds up its own row, for as long as the verifier's time limit; the others go on.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as Withdrawn
from concurrent.futures import Future, ThreadPoolExecutor, wait

from opd.tasks.source import PromptSource
from opd.tasks.verdict import Verdict
from student.data.row import Row

_POLL_SECONDS = 0.5
_MOST_REASONS = 3
_log = logging.getLogger(__name__)


class Verification:
    """Judges rows in threads; verifiers do their long computations in processes of their own (`WorkerPool`).

    Args:
        source: judges; safe to call from several threads.
        workers: answers judged at the same time.
    """

    def __init__(self, source: PromptSource, workers: int) -> None:
        self._source = source
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
        self._pending: dict[int, Future[Verdict]] = {}
        self._told: set[str] = set()

    def submit(self, row: Row) -> None:
        """Begin to judge a row; returns at once. A row that has its environment's verdict keeps it."""
        if row.verdict is not None:
            return
        self._pending[id(row)] = self._threads.submit(self._source.verify, row.prompt, row.text)

    def collect(self, rows: Sequence[Row], *, poll: Callable[[], None] = lambda: None) -> None:
        """Give each row its verdict, judging those that were not submitted too.

        Args:
            rows: the rows.
            poll: called about twice a second while waiting; may raise to give up, which cancels what has not begun.
        """
        rows = [row for row in rows if row.verdict is None]
        for row in rows:
            if id(row) not in self._pending:
                self.submit(row)
        # By id(): rows that share a key, as replayed ones may, are judged apart, and `rows` keeps them alive.
        futures = {id(row): self._pending.pop(id(row)) for row in rows}
        waiting = set(futures.values())
        try:
            while waiting:
                waiting = wait(waiting, timeout=_POLL_SECONDS).not_done
                if waiting:
                    poll()
        finally:
            for future in waiting:
                future.cancel()
        for row in rows:
            row.verdict = _verdict(futures[id(row)])
            self._tell(row)

    def _tell(self, row: Row) -> None:
        """Say why a verdict is unknown, each reason once: else a judge that is down is only a number in the metrics."""
        reason = "" if row.verdict is None or row.verdict.known else row.verdict.reason
        if reason and reason not in self._told and len(self._told) < _MOST_REASONS:
            self._told.add(reason)
            _log.warning(
                "the verdict on an answer to %s is unknown: %s; metric unknown_share counts further ones",
                row.prompt.name,
                reason.rstrip("."),
            )

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form that equal answers share; None where there is none."""
        return list(self._threads.map(lambda row: self._source.extract(row.prompt, row.text), rows))

    def close(self) -> None:
        """Give up what has not begun, stop the verifier's processes and wait for the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._source.close()  # before waiting: it ends the processes that threads may be waiting for
        self._threads.shutdown()


def _verdict(future: Future[Verdict]) -> Verdict:
    try:
        return future.result()
    except Withdrawn:
        return Verdict.unknown("the run ended first")
    except Exception as error:  # a verifier must not raise; if it does, that says nothing about the answer
        return Verdict.unknown(f"the verifier failed with {type(error).__name__}: {error}")
