"""The score store in front of a live fleet: known rows are read from disk, new ones are written in the background."""

import bisect
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from opd.errors import DataError
from opd.fleet.record.row import StoredRow, score_key
from opd.fleet.record.store import ScoreStore
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

T = TypeVar("T")

log = logging.getLogger("opd.fleet")
_HELD_BYTES = 256 * 2**20
_RETRY_SECONDS = 5.0


class CachedScores:
    """Reads in the caller's thread, writes in its own. A failing disk costs cached rows but not the run.

    Rows that cannot be written, for example on a full disk, stay in memory until they can be, up to 256 MiB of scores.
    If more than that wait for a disk that is merely slow, callers that ask for more rows wait too.

    Attributes:
        hits, misses: number of rows that were found and not found; shown in `FleetStatus.counters`.
    """

    def __init__(self, store: ScoreStore) -> None:
        self._store = store
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="opd-fleet-cache")
        self._lock = threading.Condition()  # notified when waiting rows are taken, or when writing fails
        self._waiting: list[StoredRow] = []
        self._waiting_bytes = 0
        self._failed_at: float | None = None  # when the last attempt to write failed; None while rows are written
        self._lost = 0
        self._said: set[str] = set()
        self._heads: list[Head] = []  # those for which the disk had no space
        self._described: dict[tuple[str, str, int], bool] = {}
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
        """Complete the futures of known rows; the others are stored when they are answered."""
        if info is None:
            return
        with self._lock:  # here, not in `write`, which the fleet's own thread calls
            self._lock.wait_for(lambda: self._failed_at is not None or self._waiting_bytes <= _HELD_BYTES)
        if not self._takes(info):
            return
        for item, future in zip(items, futures, strict=True):
            found = self._get(score_key(info.weights_hash, item, spec, temperature))
            if found is not None:
                self.hits += 1
                future.set_result(found)
            else:
                self.misses += 1
                future.add_done_callback(partial(self._keep, (info.name, item, spec, temperature)))

    def _keep(
        self, asked: tuple[str, ScoreItem, PayloadSpec, float], future: concurrent.futures.Future[Scores]
    ) -> None:
        """Write a row's scores now that its future is done, if it has them."""
        if not future.cancelled() and future.exception() is None:
            self.write(StoredRow(*asked, future.result()))

    def _takes(self, info: pb.TeacherInfo) -> bool:
        """Store a teacher's description; returns whether its rows may be cached, not so if keys mean other scores."""
        what = (info.name, info.weights_hash, info.compute_dtype)
        if what not in self._described:
            known = (self._attempt(self._store.teachers) or {}).values()
            same = [one for one in known if one.weights_hash == info.weights_hash]
            others = [pb.Dtype.Name(one.compute_dtype) for one in same if one.compute_dtype != info.compute_dtype]
            if others:
                log.warning(
                    "the score cache %s has scores of these weights as computed in %s, but teacher %r computes in %s: "
                    "its rows are neither looked up nor stored there; set another cache.folder for it.",
                    *(self._store.folder, others[0], info.name, pb.Dtype.Name(info.compute_dtype)),
                )
            elif self._attempt(partial(self._store.put_teacher, info)) is None:
                return True  # it is stored the next time
            self._described[what] = not others
        return self._described[what]

    def keep_head(self, head: Head) -> None:
        """Store a fetched head with the hidden states that need it; retried on closing if there is no space."""
        if self._attempt(partial(self._store.put_head, head)) is None:
            self._heads.append(head)

    def keep_tokenizer(self, fingerprint: str, document: bytes) -> None:
        """Store a fetched tokenizer beside the scores of its ids."""
        self._attempt(partial(self._store.put_tokenizer, fingerprint, document))

    def close(self) -> None:
        """Finish writing; the log says how many rows could not be stored, if any."""
        self._writer.submit(self._write_waiting, at_once=True)
        self._writer.shutdown(wait=True)
        for head in self._heads:
            self._attempt(partial(self._store.put_head, head))
        lost = self._lost + len(self._waiting)
        if lost:
            log.warning(
                "%d rows could not be stored in the score cache %s; a later run scores them again",
                lost,
                self._store.folder,
            )
        self._attempt(self._store.close)

    def write(self, row: StoredRow) -> None:
        """Store a row soon. While writing fails, rows are held only as long as there is memory for them."""
        size = row.scores.wire_bytes
        with self._lock:
            if self._failed_at is not None and self._waiting_bytes + size > _HELD_BYTES:
                self._lost += 1
            else:
                self._waiting.append(row)
                self._waiting_bytes += size
        self._writer.submit(self._write_waiting)

    def _write_waiting(self, at_once: bool = False) -> None:
        # Each attempt writes all waiting rows: one attempt per new row would keep a core busy while writing fails.
        if self._failed_at is not None and not at_once and time.monotonic() < self._failed_at + _RETRY_SECONDS:
            return
        with self._lock:  # rows that arrived while the last ones were written go to the disk together
            rows, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._lock.notify_all()
        if not rows:
            return
        try:
            self._store.put(rows)
        except OSError as error:  # with any errno: SQLite reports an exceeded quota as an I/O error
            self._hold(rows, error)
        except Exception as error:
            with self._lock:
                self._lost += len(rows)
            known = isinstance(error, DataError)
            self._warn(
                str(error) if known else f"rows could not be stored in the score cache {self._store.folder}: {error!r}"
            )
        else:
            if self._failed_at is not None:
                log.warning(
                    "the score cache %s can be written again; the rows that waited are stored", self._store.folder
                )
            self._failed_at = None

    def _hold(self, rows: list[StoredRow], error: OSError) -> None:
        """Keep rows for the next attempt, earliest first; what exceeds the memory for them is lost."""
        if self._failed_at is None:
            log.warning(
                "the score cache %s cannot be written (%s): the run goes on, and new rows wait in memory, up to %d MiB "
                "of them; free space on its disk, or check the disk.",
                self._store.folder,
                error.strerror,
                _HELD_BYTES >> 20,
            )
        with self._lock:
            self._failed_at = time.monotonic()
            self._lock.notify_all()
            rows = rows + self._waiting  # others arrived during the attempt
            size = list(itertools.accumulate((row.scores.wire_bytes for row in rows), initial=0))
            kept = bisect.bisect_right(size, _HELD_BYTES) - 1
            self._waiting, self._waiting_bytes = rows[:kept], size[kept]
            self._lost += len(rows) - kept

    def _get(self, key: str) -> Scores | None:
        return self._attempt(lambda: self._store.get(key))

    def _attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except OSError as error:
            self._warn(f"the score cache {self._store.folder} cannot be used: {error.strerror}")
        except DataError as error:
            self._warn(str(error))
        return None

    def _warn(self, sentence: str) -> None:
        """Log a warning once: what is wrong with the store as a whole shows at every row."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)
