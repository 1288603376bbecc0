"""The state of the fleet at one moment as typed records, for `opd fleet status`, metrics and logs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class FleetCounters:
    """Counts since the fleet was connected; they only grow.

    Attributes:
        rows_submitted, rows_answered, rows_failed, rows_cancelled: rows by outcome.
        tokens_answered: prompt and response tokens of answered rows.
        wire_bytes: bytes of tensors received with answered rows.
        calls: RPCs started, hedges included.
        calls_failed: RPCs that ended with an error.
        reissues: rows sent again after a failure.
        moved: rows taken back from a server that stalled.
        hedges, hedges_won: rows sent to a second replica, and those that it answered first.
        pushbacks: calls that a busy server refused.
        corrupt_payloads: responses that failed validation.
        replica_deaths: number of times that a replica was given up as dead.
        checked_rows, checked_tokens: rows, and their tokens, that a second replica scored too; not in the answered
            ones.
        disagreements: replicas rejected because their scores of such a row differed from those of others.
        cache_hits, cache_misses: rows that were found, and not found, in the score cache.
    """

    rows_submitted: int = 0
    rows_answered: int = 0
    rows_failed: int = 0
    rows_cancelled: int = 0
    tokens_answered: int = 0
    wire_bytes: int = 0
    calls: int = 0
    calls_failed: int = 0
    reissues: int = 0
    moved: int = 0
    hedges: int = 0
    hedges_won: int = 0
    pushbacks: int = 0
    corrupt_payloads: int = 0
    replica_deaths: int = 0
    checked_rows: int = 0
    checked_tokens: int = 0
    disagreements: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One teacher on one server.

    Attributes:
        teacher, address: which teacher, on which server.
        state, reason, since_seconds: its state, the reason for it, and how long it has lasted.
        weights_hash, engine, version: from its description.
        agreement_nats: largest difference from the pool at the last check; None before the first.
        in_flight_rows, in_flight_tokens, window_tokens: of this client, on the whole server.
        tokens_per_second: of the whole server, as measured by this client; None before the first answer.
        queued_tokens: tokens of all clients in the server's queue, from its load report; None without one.
        paused_seconds: seconds for which its pushback still applies.
    """

    teacher: str
    address: str
    state: str
    reason: str
    since_seconds: float
    weights_hash: str
    engine: str
    version: str
    agreement_nats: float | None
    in_flight_rows: int
    in_flight_tokens: int
    window_tokens: float
    tokens_per_second: float | None
    queued_tokens: int | None
    paused_seconds: float


@dataclass(frozen=True, slots=True)
class TeacherStatus:
    """One teacher, over all its replicas.

    Attributes:
        teacher: its name.
        weights_hash: hash of the pool's weights; "" before the first replica was admitted.
        usable, replicas: number of replicas that can serve, and of all known ones.
        queued_rows, queued_tokens: what waits in this client.
        in_flight_rows: rows that were sent and are not answered.
        down_seconds: seconds since a replica last took rows (none is healthy, or all are too busy); 0 while one does.
    """

    teacher: str
    weights_hash: str
    usable: int
    replicas: int
    queued_rows: int
    queued_tokens: int
    in_flight_rows: int
    down_seconds: float


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A listed server that has not described itself yet.

    Attributes:
        address: where it is expected.
        error: why it did not answer; "" if it was not asked yet.
    """

    address: str
    error: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The whole fleet.

    Attributes:
        teachers: sorted by name.
        replicas: sorted by teacher and address.
        silent: servers that never described themselves.
        counters: a copy of the fleet's counters.
    """

    teachers: list[TeacherStatus]
    replicas: list[ReplicaStatus]
    silent: list[ServerStatus]
    counters: FleetCounters = field(default_factory=FleetCounters)

    @property
    def usable(self) -> bool:
        """Whether every server and every replica of every teacher can serve."""
        return not self.silent and bool(self.teachers) and all(one.usable == one.replicas > 0 for one in self.teachers)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "FleetStatus":
        """The status from what `dataclasses.asdict` made of one; KeyError or TypeError for other values."""
        return cls(
            [TeacherStatus(**one) for one in values["teachers"]],
            [ReplicaStatus(**one) for one in values["replicas"]],
            [ServerStatus(**one) for one in values["silent"]],
            FleetCounters(**values["counters"]),
        )
