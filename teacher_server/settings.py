"""Every setting of a teacher server, grouped by purpose; the flags of `opd serve` are these fields."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from opd.config.base import Settings

MIB = 1024 * 1024


class LimitSettings(Settings):
    """What one request may ask for, and how much the server accepts at once."""

    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens per engine batch; a longer sequence is a batch of its own."""
    max_batch_sequences: int = Field(default=256, ge=1)
    """Maximum sequences per engine batch."""
    max_tokens_in_flight: int = Field(default=262_144, ge=1)
    """Maximum tokens of all requests that wait or run. Beyond it, requests are refused with RESOURCE_EXHAUSTED."""
    max_reply_bytes_in_flight: int = Field(default=1024 * MIB, ge=1)
    """Maximum bytes of scores that are promised or computed but not sent yet. Beyond it, requests are refused."""
    stream_window_bytes: int = Field(default=32 * MIB, ge=1)
    """Bytes of scores that one call may compute ahead of its reader. One sequence is always allowed."""
    max_client_share: float = Field(default=0.75, gt=0, le=1)
    """Share of both budgets that one principal (a token's name, or an address if there are no tokens) may hold while it
    already holds some, so that room stays for others. One client name of a principal gets this share of that share."""
    max_sequence_tokens: int = Field(default=0, ge=0)
    """Longest sequence in tokens, prompt and response together; 0 means the engine's limit."""
    max_k: int = Field(default=1024, ge=1)
    """Largest k of top-k and gather."""
    max_sequences: int = Field(default=256, ge=1)
    """Maximum sequences per request."""
    max_request_tokens: int = Field(default=262_144, ge=2)
    """Maximum tokens per request; lowered to max_tokens_in_flight if that is smaller."""
    max_request_bytes: int = Field(default=32 * MIB, ge=1024)
    """Maximum bytes of a request message."""
    max_request_seconds: float = Field(default=600.0, gt=0)
    """Deadline for requests that set none; a longer deadline is reduced to it."""
    send_timeout_seconds: float = Field(default=120.0, gt=0)
    """A reader that takes no message for this long loses its stream, and its share of the budgets is released."""
    allow_full: bool = False
    """Serve the payload full, the logits over the whole vocabulary. For tests."""


class OpenCallSettings(Settings):
    """How many calls may be open, and how much memory and time receiving their requests may take."""

    max_calls: int = Field(default=1024, ge=1)
    """Maximum open calls of all callers that may use the teachers: those with a token, or everyone without tokens."""
    max_caller_share: float = Field(default=0.5, gt=0, le=1)
    """Share of max_calls that one caller may hold: a token's name, or an address if there are no tokens."""
    max_unauthenticated_calls: int = Field(default=64, ge=4)
    """Maximum open health checks without a token, counted separately; one address may hold a quarter of them."""
    max_watches: int = Field(default=32, ge=4)
    """Maximum open health watches without a token, counted separately; one address may hold a quarter of them."""
    watch_seconds: float = Field(default=3600.0, gt=0)
    """Seconds after which a health watch ends; a watcher that is still interested starts another."""
    max_streams_per_connection: int = Field(default=256, ge=1)
    """Maximum open calls per connection. gRPC clients make further calls wait, but if calls follow each other at the
    limit, the server refuses some with UNAVAILABLE: spread more calls over several connections."""
    receive_seconds: float = Field(default=20.0, gt=0)
    """Seconds that the request of a call may take to arrive."""
    receive_budget_bytes: int = Field(default=512 * MIB, ge=1)
    """Bytes of requests that are received at once, a quarter of them per caller, and at least one request. Each counts
    as the largest allowed one, because its size is not known in advance. Further ones wait for receive_seconds."""


class TransportSettings(Settings):
    """How replies are sent."""

    chunk_bytes: int = Field(default=512 * 1024, ge=65_536, le=4 * MIB)
    """Chunk size in bytes unless the client asks for another; 256 KiB to 1 MiB is best."""
    zstd: bool = True
    """Compress tensors for clients that ask for it."""
    pack_ids: bool = True
    """Send top-k ids in 18 bits. If off, in 32 bits: 40 % more bytes at K = 64 and a little less processor time on both
    sides, for links that carry more than the clients can decode."""


class SecuritySettings(Settings):
    """Who may connect and what they may do."""

    allow_insecure: bool = False
    """Listen beyond loopback without TLS. Everyone on that network can then read the traffic and use the teachers."""
    tls_cert: Path | None = None
    """PEM certificate chain of the server; reloaded when it changes."""
    tls_key: Path | None = None
    """PEM key of the server."""
    client_ca: Path | None = None
    """PEM authorities of client certificates; turns on mutual TLS."""
    tokens: Path | None = None
    """YAML list of bearer tokens with name, token or sha256, and scopes (score, admin); reloaded when it changes."""
    trust_remote_code: tuple[str, ...] = ()
    """Models that may run their own code, each as MODEL@REVISION with a full commit hash."""

    @model_validator(mode="after")
    def _complete(self) -> "SecuritySettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; set both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key: mutual TLS is TLS")
        return self


class TeacherEngineSettings(Settings):
    """How teachers are run."""

    engine: str = "transformers"
    """Engine that runs the teachers: transformers, vllm, sglang or a registered name."""
    device: str = "auto"
    """Device of the models, for example cpu or cuda:0."""
    dtype: str = "auto"
    """Compute dtype: f32, bf16, f16, or auto."""
    deterministic: bool = False
    """Make a row's numbers independent of its batch, bit for bit. Slower on a GPU, and prompts are not shared."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further keyword arguments of the engine class."""
    memory_budget_bytes: int = Field(default=0, ge=0)
    """Bytes of weights that may be awake at once, as allocated. Beyond it, the least recently used teacher is put to
    sleep. 0 means no limit."""
    on_failure: Literal["exit", "restart"] = "exit"
    """What happens when an engine dies: exit ends the process with an error, restart loads the teacher again."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one teacher before the process exits anyway."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """Seconds on one batch after which an engine counts as stuck and the process exits."""
    load_seconds: float = Field(default=1800.0, gt=0)
    """Seconds that loading a model may take, and waiting for another one to load. A slower model is given up. Since
    loading cannot be interrupted, no other model is loaded until it ends."""
    self_test: bool = True
    """Score a short sequence twice before a teacher counts as ready."""


class LogSettings(Settings):
    """What is logged to standard error, one JSON object per line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level that is logged."""
    requests: bool = False
    """Log every finished request. Refused and failed ones are always logged."""
    tracing: bool = False
    """Export OpenTelemetry spans. Needs the extra otel; configured by the standard OTEL_* variables."""
    prompts: bool = False
    """Log the token ids of failed requests. They are user data: leave this off unless you are debugging."""


class ServerSettings(Settings):
    """A teacher server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port of the service; 0 picks a free one."""
    metrics_port: int = Field(default=0, ge=-1, le=65_535)
    """Port of /metrics; 0 picks a free one, -1 turns it off."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics, which is never encrypted and asks for no token."""
    grace_seconds: float = Field(default=120.0, ge=0)
    """Seconds that calls in flight may take after SIGTERM."""
    settle_seconds: float = Field(default=0.5, ge=0)
    """Seconds that new calls are still accepted after health says NOT_SERVING, so that clients can go elsewhere."""
    limits: LimitSettings = LimitSettings()
    """Bounds and budgets."""
    calls: OpenCallSettings = OpenCallSettings()
    """Open calls, and receiving requests."""
    transport: TransportSettings = TransportSettings()
    """Chunks and compression."""
    security: SecuritySettings = SecuritySettings()
    """TLS, tokens, scopes."""
    engine: TeacherEngineSettings = TeacherEngineSettings()
    """Engines, restarts and memory."""
    log: LogSettings = LogSettings()
    """Logs."""
    fault: str = ""
    """Faults to inject, for chaos tests; see `teacher_server.faults`."""
