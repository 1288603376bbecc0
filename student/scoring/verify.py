"""Verification during the rollout: answers are judged in parallel, each as soon as its row is finished.

An answer whose check hangs delays only its own row, for at most the verifier's time limit.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as Withdrawn
from concurrent.futures import Future, ThreadPoolExecutor, wait

from opd.tasks.source import PromptSource
from opd.tasks.verdict import NO_REFERENCE, Verdict
from student.data.row import Row

_POLL_SECONDS = 0.5
_MOST_REASONS = 3
_log = logging.getLogger(__name__)


class Verification:
    """Judges rows in threads; verifiers run long computations in separate processes (`Workers`).

    Args:
        source: judges answers; safe to call from several threads.
        workers: number of answers judged at the same time.
    """

    def __init__(self, source: PromptSource, workers: int) -> None:
        self._source = source
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
        self._pending: dict[int, Future[Verdict]] = {}
        self._told: set[str] = set()

    def submit(self, row: Row) -> None:
        """Start judging a row; returns at once. A row with a verdict from its environment keeps it."""
        if row.verdict is not None:
            return
        self._pending[id(row)] = self._threads.submit(self._source.verify, row.prompt, row.text)

    def collect(self, rows: Sequence[Row], *, poll: Callable[[], None] = lambda: None) -> None:
        """Give each row its verdict, including rows that were not submitted.

        Args:
            rows: the rows.
            poll: called about twice a second while waiting; may raise to give up, which cancels work not yet started.
        """
        rows = [row for row in rows if row.verdict is None]
        for row in rows:
            if id(row) not in self._pending:
                self.submit(row)
        # By id(), because replayed rows may share a key and are judged separately; `rows` keeps them alive.
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
        """Log why a verdict is unknown, once per reason; otherwise a failed judge would only show as a metric.

        Open questions, which have no reference answer, are not warned of.
        """
        reason = "" if row.verdict is None or row.verdict.known else row.verdict.reason
        if reason not in ("", NO_REFERENCE) and reason not in self._told and len(self._told) < _MOST_REASONS:
            self._told.add(reason)
            _log.warning(
                "the verdict on an answer to %s is unknown: %s; further ones are counted in the metric unknown_share",
                row.prompt.name,
                reason.rstrip("."),
            )

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form in which equal answers compare equal; None if there is none."""
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
        return Verdict.unknown("the run ended before the verifier answered")
    except Exception as error:  # a verifier must not raise; if it does, that says nothing about the answer
        return Verdict.unknown(f"the verifier failed with {type(error).__name__}: {error}")
