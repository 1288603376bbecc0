"""Settings of the fleet client; every key is documented here and nowhere else."""

from pathlib import Path

from pydantic import Field

from opd.config import Settings
from opd.wire.channel import ClientSecurity


class CallSettings(Settings):
    """How rows become calls, and what bounds a call."""

    in_flight_tokens: int = Field(
        default=32_768,
        ge=1,
        description="Maximum tokens, prompts and responses together, in flight on one server; the ranks of a run share "
        "it. The client starts with two rows per server, sends more with every reply up to this bound, and halves what "
        "it sends when the server refuses a call as overloaded.",
    )
    rows: int = Field(
        default=16, ge=1, description="Maximum rows per call; rows of the same prompt are sent together where possible."
    )
    tokens: int = Field(
        default=16_384,
        ge=1,
        description="Maximum tokens per call, prompts and responses together; a longer row is sent in a call of its "
        "own.",
    )
    attempts: int = Field(
        default=6,
        ge=1,
        description="Failed attempts after which a row is given up with the last error, so that a row that crashes "
        "servers cannot crash the whole fleet. Refusals by an overloaded server do not count.",
    )
    attempt_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without a message from the server after which a call is given up and its unanswered rows "
        "are sent again. Raise it if a server may need longer for one batch.",
    )
    row_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Seconds from submission within which a row must be scored; otherwise it fails. 0 means no "
        "deadline except outage.budget_seconds.",
    )
    backoff_seconds: float = Field(
        default=0.05,
        gt=0,
        description="Seconds to wait before a row whose call failed is sent again, shortened at random by up to half; "
        "they double with every failed attempt, up to 5 s.",
    )
    retry_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Retry budget: rows that may be sent again after a failure, per row sent for the first time. "
        "Without budget left they wait, after a row's first failure for at most 0.2 s, so that a failing fleet does "
        "not get even more load.",
    )
    retry_rate: float = Field(
        default=10.0,
        gt=0,
        description="Retry budget: rows per second that may be sent again after a failure whatever retry_ratio says.",
    )
    chunk_bytes: int = Field(
        default=1 << 20,
        ge=65_536,
        le=4_194_304,
        description="Size in bytes of the chunks in which servers are asked to send scores.",
    )
    zstd: bool = Field(
        default=False,
        description="Ask servers to compress scores with zstd. This saves time if the network between client and "
        "server is slower than roughly 10 Gb/s.",
    )


class HedgeSettings(Settings):
    """When a straggling row is sent to a second replica; the first answer wins, the other call is cancelled."""

    enabled: bool = Field(
        default=True, description="Send straggling rows to a second replica as well; the first answer counts."
    )
    quantile: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="A call is overdue once it has taken longer than its expected time multiplied by this quantile of "
        "the recent ratios of actual to expected times. Lower values hedge sooner and more often.",
    )
    cap: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Maximum share of the rows sent that may be sent to a second replica as well; the first one always "
        "may.",
    )
    min_seconds: float = Field(
        default=0.05,
        ge=0,
        description="Seconds that a second attempt must be expected to save; otherwise it is not made.",
    )


class HealthSettings(Settings):
    """When a replica counts as suspect or dead, and when it is used again."""

    ping_seconds: float = Field(default=2.0, gt=0, description="Seconds between pings of a healthy server.")
    ping_timeout_seconds: float = Field(
        default=2.0, gt=0, description="Seconds after which a ping without an answer counts as failed."
    )
    revive_seconds: float = Field(
        default=0.5,
        gt=0,
        description="Seconds between pings of a server that does not answer, or has a replica that is dead, rejected "
        "or not checked yet.",
    )
    ping_failures: int = Field(
        default=3, ge=1, description="Failed pings in a row after which a replica counts as dead."
    )
    request_failures: int = Field(
        default=3,
        ge=1,
        description="Failed calls in a row after which a replica counts as dead, even if it answers pings.",
    )
    cool_off_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Seconds before a replica that died of failed calls or corrupt answers is checked again. They "
        "double, up to sixtyfold, each time it dies again before it has answered twenty calls; a new server process "
        "starts with the first value.",
    )
    agreement_nats: float = Field(
        default=0.25,
        ge=0,
        description="Largest difference in nats that a log-prob of a replica may have from those of the teacher's "
        "other replicas; a replica beyond it gets no rows. The default allows for different kernels on equal bfloat16 "
        "weights (measured in docs/fleet.md); with equal hardware everywhere, 0.05 or less is enough.",
    )
    agreement_tokens: int = Field(
        default=32,
        ge=4,
        description="Response tokens of the random row on which a replica is compared with the others before it is "
        "used.",
    )
    cross_score_share: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="Share of the rows that a second replica also scores, to find replicas that have begun to compute "
        "something else. If the scores differ by more than agreement_nats, a third replica decides and the odd one out "
        "is rejected. It has no effect while a teacher has one replica; 0 turns it off.",
    )
    cross_score_seconds: float = Field(
        default=1.0,
        ge=0,
        description="Least seconds that a row with one score waits for the second. A second score that is long overdue "
        "after that is given up, and the row is delivered unchecked. Raise it if no chosen row may go unchecked.",
    )
    check_seed: int | None = Field(
        default=None,
        description="Seed of the rows on which replicas are compared and of the choice of rows that are scored twice. "
        "By default it is drawn anew for every connection, so that no server can predict them; set it only to repeat a "
        "test. Scores do not depend on it.",
    )


class OutageSettings(Settings):
    """What happens while no replica of a teacher can serve."""

    budget_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds that rows wait for a teacher without a usable replica, or whose replicas all refuse them; "
        "then they fail and the run ends resumably.",
    )
    emergency_after_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without a usable replica after which the trainer saves an emergency checkpoint, once per "
        "outage.",
    )
    notice_seconds: float = Field(
        default=60.0, gt=0, description="Seconds between log lines that say that the run is waiting for a teacher."
    )


class CacheSettings(Settings):
    """A store of scores in front of the fleet; rows that were scored before are not sent again."""

    folder: Path | None = Field(
        default=None, description="Folder in which scores are stored and looked up; without it there is no cache."
    )
    max_bytes: int = Field(
        default=50 * 2**30,
        ge=0,
        description="Maximum size of the store in bytes, 50 GiB by default; beyond it the least recently used scores "
        "are dropped, and the log says so. 0 means no limit, for a store to train from later.",
    )


class FleetSettings(Settings):
    """Everything that can be set on a `TeacherFleet`."""

    calls: CallSettings = Field(
        default_factory=CallSettings,
        description="How rows are grouped into calls, and when failed rows are sent again.",
    )
    hedge: HedgeSettings = Field(
        default_factory=HedgeSettings, description="When a straggling row is sent to a second replica as well."
    )
    health: HealthSettings = Field(
        default_factory=HealthSettings, description="When a replica counts as dead, and how replicas are compared."
    )
    outage: OutageSettings = Field(
        default_factory=OutageSettings, description="How long a run waits for a teacher that no replica serves."
    )
    security: ClientSecurity = Field(
        default_factory=ClientSecurity, description="TLS, and the token or certificate that the client presents."
    )
    cache: CacheSettings = Field(
        default_factory=CacheSettings, description="A store of scores on disk, in front of the fleet."
    )
    connect_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Seconds that connecting may take until every requested teacher has a usable replica. Raise it if "
        "servers are still loading their models when the run starts.",
    )
    discovery_seconds: float = Field(
        default=2.0, gt=0, description="Seconds between two reads of a file: or dns: endpoint, which lists the servers."
    )
    expected_weights: dict[str, str] = Field(
        default_factory=dict,
        description="Map from a teacher's name to the weights hash that its replicas must have. For a teacher without "
        "an entry, the majority of its replicas decides.",
    )
