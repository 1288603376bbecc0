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
        description="Maximum tokens (prompts and responses) that one server may have in flight from this client, and "
        "from all ranks of a run together. The window starts at two rows and grows with every reply up to "
        "this bound; a server that pushes back halves it.",
    )
    rows: int = Field(default=16, ge=1, description="Maximum rows per call; rows of one prompt go together.")
    tokens: int = Field(default=16_384, ge=1, description="Maximum tokens per call; a longer row travels alone.")
    attempts: int = Field(
        default=6,
        ge=1,
        description="Failed attempts of a row after which its future fails. This limits the damage of a row that "
        "crashes its servers. Refusals by a busy or draining server do not count.",
    )
    attempt_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without any message from the server after which an attempt is given up.",
    )
    row_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Default deadline of a row in seconds from submission; 0 means only the outage budget.",
    )
    backoff_seconds: float = Field(
        default=0.05,
        gt=0,
        description="Seconds to wait before the first re-issue of a row; doubles with every attempt.",
    )
    retry_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Retry budget: re-issues allowed per first attempt. Beyond it they wait, a row's first re-issue at "
        "most 0.2 s.",
    )
    retry_rate: float = Field(
        default=10.0, gt=0, description="Retry budget: re-issues per second that are always granted."
    )
    chunk_bytes: int = Field(
        default=1 << 20,
        ge=65_536,
        le=4_194_304,
        description="Requested size in bytes of a message of the score stream.",
    )
    zstd: bool = Field(
        default=False,
        description="Ask for zstd-compressed tensors. This pays off below roughly 10 Gb/s between client and server.",
    )


class HedgeSettings(Settings):
    """When a straggling row is sent to a second replica; the first answer wins, the other call is cancelled."""

    enabled: bool = Field(default=True, description="Hedge stragglers: send overdue rows to a second replica.")
    quantile: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="A row is overdue when its age exceeds its expected latency times this quantile of the recent "
        "ratios of actual to expected latency.",
    )
    cap: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Maximum share of all sent rows that may be hedged; the first hedge is always allowed.",
    )
    min_seconds: float = Field(
        default=0.05, ge=0, description="A hedge must be expected to save at least this many seconds."
    )


class HealthSettings(Settings):
    """When a replica counts as suspect or dead, and when it is used again."""

    ping_seconds: float = Field(default=2.0, gt=0, description="Seconds between pings of a healthy server.")
    ping_timeout_seconds: float = Field(
        default=2.0, gt=0, description="Seconds after which an unanswered ping has failed."
    )
    revive_seconds: float = Field(
        default=0.5, gt=0, description="Seconds between pings of a server with a dead or unverified replica."
    )
    ping_failures: int = Field(default=3, ge=1, description="Failed pings in a row after which a replica is dead.")
    request_failures: int = Field(
        default=3,
        ge=1,
        description="Failed requests in a row after which a replica is dead, even while it answers its pings.",
    )
    cool_off_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Seconds before a replica that was declared dead because of failed requests may be checked again. "
        "Doubles, up to sixtyfold, if it dies again before it has served twenty calls. A new server process"
        " starts afresh.",
    )
    agreement_nats: float = Field(
        default=0.25,
        ge=0,
        description="Largest difference of log-probs in nats between a replica and its pool; a replica beyond it is "
        "rejected. The default lies above the differences between kernels on equal bfloat16 weights (measured in "
        "docs/fleet.md); on equal hardware 0.05 and less are fine.",
    )
    agreement_tokens: int = Field(
        default=32, ge=4, description="Response tokens of the row that replicas are compared on before they serve."
    )
    cross_score_share: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="Share of the rows that a second replica also scores. If the scores differ by more than "
        "agreement_nats, a third replica decides, and the odd one out is rejected. Has no effect while a "
        "teacher has one replica; 0 turns it off.",
    )
    cross_score_seconds: float = Field(
        default=1.0,
        ge=0,
        description="Minimum seconds that a row waits for its second score. A second score that is far later than "
        "expected by then is given up, and the row is delivered with one. Raise it if no row may go "
        "unchecked.",
    )
    check_seed: int | None = Field(
        default=None,
        description="Seed for the rows that replicas are compared on and for the choice of rows that are scored twice. "
        "By default it is drawn for every connection, so that no server can predict them. Scores do not "
        "depend on it.",
    )


class OutageSettings(Settings):
    """What happens while no replica of a teacher can serve."""

    budget_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds that rows wait for a teacher without a usable replica before they fail.",
    )
    emergency_after_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Seconds of outage after which the caller is told to save an emergency checkpoint.",
    )
    notice_seconds: float = Field(
        default=10.0, gt=0, description="Seconds between notices that the client is waiting for a teacher."
    )


class CacheSettings(Settings):
    """A store of scores in front of the fleet; rows that were scored before are not sent again."""

    folder: Path | None = Field(default=None, description="Folder of the store. Without it there is no cache.")
    max_bytes: int = Field(
        default=50 * 2**30,
        ge=0,
        description="Bytes beyond which the least recently used entries are dropped (50 GiB by default; the log says "
        "when it happens). 0 keeps everything, for a store to train from later.",
    )


class FleetSettings(Settings):
    """Everything that can be set on a `TeacherFleet`."""

    calls: CallSettings = Field(default_factory=CallSettings, description="How rows become calls.")
    hedge: HedgeSettings = Field(default_factory=HedgeSettings, description="Second attempts for stragglers.")
    health: HealthSettings = Field(default_factory=HealthSettings, description="Health of replicas.")
    outage: OutageSettings = Field(default_factory=OutageSettings, description="A whole pool gone.")
    security: ClientSecurity = Field(default_factory=ClientSecurity, description="TLS and credentials.")
    cache: CacheSettings = Field(default_factory=CacheSettings, description="A store of scores on disk.")
    connect_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Seconds that connect waits for the first replica of every requested teacher. Every server is asked"
        " once in any case.",
    )
    discovery_seconds: float = Field(
        default=2.0, gt=0, description="Seconds between reads of a discovery file or a DNS name."
    )
    expected_weights: dict[str, str] = Field(
        default_factory=dict,
        description="Mapping from teacher name to the weights hash that it must have. Without an entry, the majority of"
        " the replicas decides.",
    )
