"""The fleet at one moment, as typed records: for `opd fleet status`, for metrics and logs."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class FleetCounters:
    """What happened since the fleet was connected; all only grow.

    Attributes:
        rows_submitted, rows_answered, rows_failed, rows_cancelled: rows by outcome.
        tokens_answered: prompt and response tokens of answered rows.
        wire_bytes: bytes of tensors received with answered rows.
        calls: RPCs started, hedges included.
        calls_failed: RPCs that ended in an error.
        reissues: rows sent again after a failure.
        moved: rows taken back from a server that stalled.
        hedges, hedges_won: rows sent to a second replica, and those that it answered first.
        pushbacks: calls that a busy server refused.
        corrupt_payloads: answers that failed validation.
        replica_deaths: how often a replica was given up as dead.
        checked_rows, checked_tokens: rows that a second replica scored too, on top of the answered ones.
        disagreements: replicas rejected because their scores of such a row stood alone.
        cache_hits, cache_misses: rows that were found in the score cache, and rows that were not.
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
        teacher, address: which.
        state, reason, since_seconds: of its life cycle.
        weights_hash, engine, version: what it says it is.
        agreement_nats: largest difference from the pool at the last check, None before the first.
        in_flight_rows, in_flight_tokens, window_tokens: of the whole server, from this client.
        tokens_per_second: of the whole server, as this client measures it; None before the first answer.
        queued_tokens: what the server says waits there from all clients; None when it did not say.
        paused_seconds: how long its pushback still holds.
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
    """One teacher over all its replicas.

    Attributes:
        teacher: its name.
        weights_hash: of the pool, "" before the first replica was admitted.
        usable, replicas: how many can serve, of how many known.
        queued_rows, queued_tokens: what waits in this client.
        in_flight_rows: what has been sent.
        down_seconds: since a replica of it last took rows (none is healthy, or all are too busy); 0 while one does.
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
    """A server that is listed but has not described itself yet.

    Attributes:
        address: where it should be.
        error: why it did not answer, "" when it was not asked yet.
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
        counters: a copy.
    """

    teachers: list[TeacherStatus]
    replicas: list[ReplicaStatus]
    silent: list[ServerStatus]
    counters: FleetCounters = field(default_factory=FleetCounters)
