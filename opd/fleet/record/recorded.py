"""A store of recorded scores in place of a fleet, to train without any teacher.

    with TeacherFleet.connect("store:scores/math") as fleet: ...

A row that was not recorded with exactly its ids, spans, payload and temperature is an error, because there is no server
to ask.
"""

import concurrent.futures
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from opd.errors import ConfigError, DataError, TeacherNotFoundError
from opd.fleet.membership.agreement import AgreementReport
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.record.row import score_key
from opd.fleet.record.store import ScoreStore
from opd.fleet.source import ScoreFuture, ScoreSource
from opd.fleet.status.records import FleetCounters, FleetStatus, TeacherStatus
from opd.fleet.weights import WeightsUpdate
from opd.wire.bounds import RequestBounds, check_items
from opd.wire.fingerprint import token_bytes
from opd.wire.tokenizer import tokenizer_from
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb


class RecordedFleet(ScoreSource):
    """A `ScoreStore` as a `ScoreSource`; nothing goes over the network.

    Args:
        folder: the folder of a store that `opd score`, or a fleet with a cache, has filled.

    Raises:
        DataError: if the folder is not a store or holds no teacher.
    """

    recorded = True

    def __init__(self, folder: Path | str) -> None:
        if not (Path(folder) / "teachers").is_dir():
            raise DataError(f"{folder} is not a score store; make one with `opd score --out {folder}`.")
        self.store = ScoreStore(folder)
        self._infos = self.store.teachers()
        if not self._infos:
            raise DataError(f"score store {folder} holds no teacher; fill it with `opd score --out {folder}`.")
        self._counters = FleetCounters()

    def teachers(self) -> dict[str, pb.TeacherInfo]:
        return dict(self._infos)

    def describe(self, teacher: str) -> pb.TeacherInfo:
        if teacher not in self._infos:
            recorded = ", ".join(sorted(self._infos))
            raise TeacherNotFoundError(
                f"score store {self.store.folder} has no teacher {teacher!r}; it holds {recorded}."
            )
        return self._infos[teacher]

    def submit_many(
        self,
        teacher: str,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        *,
        temperature: float = 1.0,
        groups: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> list[ScoreFuture]:
        """See `ScoreSource.submit_many`; the futures are done when they are returned."""
        info = self.describe(teacher)
        bounds = RequestBounds.from_info(info)
        futures: list[ScoreFuture] = []
        for item, group in zip(items, groups or [""] * len(items), strict=True):
            check_items([item], spec, temperature, bounds)
            future: ScoreFuture = concurrent.futures.Future()
            self._counters.rows_submitted += 1
            try:
                # Not `get`, which removes damaged rows: a record cannot be scored again.
                scores = self.store.read(score_key(info.weights_hash, item, spec, temperature))
                if scores is None:
                    raise DataError(self._missing(teacher, item, spec, group))
            except DataError as error:
                self._counters.rows_failed += 1
                future.set_exception(error)
            else:
                self._counters.rows_answered += 1
                future.set_result(scores)
            futures.append(future)
        return futures

    def _missing(self, teacher: str, item: ScoreItem, spec: PayloadSpec, group: str) -> str:
        payload = f"{spec.kind.value}({spec.k})" if spec.k else spec.kind.value
        part = f"at {item.scored_length} of {item.response_length} response tokens of" if item.spans else "for"
        row = f"{part} the row{f' of group {group!r}' if group else ''} with {len(item.token_ids)} tokens"
        digest = hashlib.sha256(np.ascontiguousarray(item.token_ids, "<u4").tobytes()).hexdigest()[:12]
        return (
            f"store {self.store.folder} has no {payload} scores of teacher {teacher!r} {row} (SHA-256 of its ids "
            f"{digest}); record it with `opd score --out` or with cache.folder on a live fleet, train with the recipe, "
            "seed and first weights of the recorded run, or connect to a live teacher."
        )

    def wait(self, futures: Sequence[ScoreFuture], hooks: OutageHooks | None = None) -> list[Scores]:
        """See `ScoreSource.wait`; a record has no outages."""
        return [future.result() for future in futures]

    def head(self, teacher: str) -> Head:
        wanted = self.describe(teacher).head.hash
        found = self.store.head(wanted) if wanted else None
        if found is None:
            raise TeacherNotFoundError(
                f"the head of teacher {teacher!r} was not recorded; record hidden payloads again."
            )
        return found

    def tokens(self, teacher: str, start: int) -> Sequence[bytes]:
        """See `ScoreSource.tokens`; known if the teacher's tokenizer was recorded."""
        document = self.tokenizer(teacher)
        if not document:
            return ()
        return token_bytes(tokenizer_from(document, self.describe(teacher).tokenizer, teacher))[start:]

    def tokenizer(self, teacher: str) -> bytes:
        return self.store.tokenizer(self.describe(teacher).tokenizer.fingerprint)

    def verify(self, teacher: str) -> AgreementReport:
        """Always agrees: a record has a single replica."""
        self.describe(teacher)
        return AgreementReport(teacher, 0.0, {f"store:{self.store.folder}": 0.0}, {})

    def adopt(self, teacher: str, weights_hash: str = "") -> None:
        """Does nothing: a record has one set of weights."""
        self.describe(teacher)

    def update_weights(self, teacher: str, folder: str | Path, *, timeout: float = 600.0) -> WeightsUpdate:
        """Always raises `ConfigError`: a record has one set of weights."""
        self.describe(teacher)
        raise ConfigError(
            f"teacher {teacher!r} is recorded in {self.store.folder}; connect to live servers to update it."
        )

    def outages(self) -> list[Outage]:
        """Always empty."""
        return []

    def status(self) -> FleetStatus:
        """The recorded teachers, with one replica each."""
        teachers = [
            TeacherStatus(name, info.weights_hash, 1, 1, 0, 0, 0, 0.0) for name, info in sorted(self._infos.items())
        ]
        return FleetStatus(teachers, [], [], self._counters)

    def observe(self, watcher: Callable[[str, float], None]) -> None:
        """Never calls the watcher: a recorded row has no latency to observe."""

    def close(self) -> None:
        """Close the store's file."""
        self.store.close()
