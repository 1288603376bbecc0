"""The score store in front of a live fleet: known rows are answered from disk, new ones written in the background."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from opd.errors import DataError
from opd.fleet.record import earlier
from opd.fleet.record.row import StoredRow
from opd.fleet.record.store import ScoreStore
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

T = TypeVar("T")

log = logging.getLogger("opd.fleet")


class CachedScores:
    """Reads in the caller's thread, writes in one of its own; a failing disk costs the cached rows, not the run.

    Attributes:
        hits, misses: rows that were found and that were not, so far; shown in `FleetStatus.counters`.
    """

    def __init__(self, store: ScoreStore) -> None:
        self._store = store
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="opd-fleet-cache")
        self._lock = threading.Lock()
        self._waiting: list[StoredRow] = []
        self._described: set[tuple[str, str]] = set()
        self.hits = 0
        self.misses = 0

    def look_up(
        self,
        info: pb.TeacherInfo | None,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        temperature: float,
        futures: Sequence[concurrent.futures.Future[Scores]],
    ) -> None:
        """Fulfil the futures of known rows; arrange for the others to be kept when they are answered."""
        if info is None:
            return
        if (info.name, info.weights_hash) not in self._described:
            self._described.add((info.name, info.weights_hash))
            self._attempt(lambda: self._store.put_teacher(info))
        for item, future in zip(items, futures, strict=True):
            found = earlier.find(self._get, info.weights_hash, item, spec, temperature)
            if found is not None:
                self.hits += 1
                future.set_result(found)
            else:
                self.misses += 1
                future.add_done_callback(_Keeper(self, info.name, item, spec, temperature))

    def keep_head(self, head: Head) -> None:
        """Keep a fetched head beside the hidden states that need it."""
        self._attempt(lambda: self._store.put_head(head))

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)
        self._attempt(self._store.close)

    def write(self, row: StoredRow) -> None:
        """Keep a row, soon."""
        with self._lock:
            self._waiting.append(row)
        self._writer.submit(self._write_waiting)

    def _write_waiting(self) -> None:
        with self._lock:  # what came while the last rows were written goes to the disk together
            rows, self._waiting = self._waiting, []
        if rows:
            self._attempt(lambda: self._store.put(rows))

    def _get(self, key: str) -> Scores | None:
        return self._attempt(lambda: self._store.get(key))

    def _attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except OSError as error:
            log.warning("the score cache %s cannot be used: %s", self._store.folder, error.strerror)
            return None
        except DataError as error:
            log.warning("%s", error)
            return None


class _Keeper:
    """Writes a row's scores when its future has them."""

    def __init__(
        self, cache: CachedScores, teacher: str, item: ScoreItem, spec: PayloadSpec, temperature: float
    ) -> None:
        self._cache = cache
        self._row = (teacher, item, spec, temperature)

    def __call__(self, future: concurrent.futures.Future[Scores]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._cache.write(StoredRow(*self._row, future.result()))
