"""Every setting of a teacher server, grouped by purpose; the flags of `opd serve` are these fields."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from opd.config.base import Settings

MIB = 1024 * 1024


class LimitSettings(Settings):
    """What one request may ask, and how much the server takes on at once."""

    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one engine batch; a longer sequence is a batch of its own."""
    max_batch_sequences: int = Field(default=256, ge=1)
    """Sequences of one engine batch."""
    max_tokens_in_flight: int = Field(default=262_144, ge=1)
    """Tokens of all requests that wait or run; beyond, requests are refused with RESOURCE_EXHAUSTED."""
    max_reply_bytes_in_flight: int = Field(default=1024 * MIB, ge=1)
    """Bytes of scores that are promised or computed and not sent yet; beyond, requests are refused."""
    stream_window_bytes: int = Field(default=32 * MIB, ge=1)
    """Bytes of scores of one call that may be computed ahead of its reader; one sequence always may."""
    max_client_share: float = Field(default=0.75, gt=0, le=1)
    """Share of both budgets that one principal (a token's name, or an address where there are no tokens) may hold while
    it already holds some, and share of that for one client name of it: room stays for the others."""
    max_sequence_tokens: int = Field(default=0, ge=0)
    """Longest sequence, prompt and response together; 0 is what the engine can."""
    max_k: int = Field(default=1024, ge=1)
    """Largest k of top-k and gather."""
    max_sequences: int = Field(default=256, ge=1)
    """Sequences of one request."""
    max_request_tokens: int = Field(default=262_144, ge=2)
    """Tokens of one request; lowered to max_tokens_in_flight where that is less."""
    max_request_bytes: int = Field(default=32 * MIB, ge=1024)
    """Bytes of one request message."""
    max_request_seconds: float = Field(default=600.0, gt=0)
    """Deadline of requests that set none; a longer one is cut to it."""
    send_timeout_seconds: float = Field(default=120.0, gt=0)
    """A reader that takes no message for this long loses its stream, and with it its part of the budgets."""
    allow_full: bool = False
    """Serve payload full, the logits over the whole vocabulary; for tests."""


class OpenCallSettings(Settings):
    """How many calls may be open, and what receiving their requests may cost."""

    max_calls: int = Field(default=1024, ge=1)
    """Calls at once of all callers that may use the teachers: those with a token, or all where there are no tokens."""
    max_caller_share: float = Field(default=0.5, gt=0, le=1)
    """Share of them that one caller may hold: a token's name, or an address where there are no tokens."""
    max_unauthenticated_calls: int = Field(default=64, ge=4)
    """Health checks at once of callers without a token, in places of their own; a quarter of them per address."""
    max_watches: int = Field(default=32, ge=4)
    """Health watches at once of callers without a token, in places of their own; a quarter of them per address."""
    watch_seconds: float = Field(default=3600.0, gt=0)
    """A health watch ends after this long; a watcher that is still interested starts another."""
    max_streams_per_connection: int = Field(default=256, ge=1)
    """Calls at once on one connection. gRPC clients make further ones wait, but where calls follow each other at the
    limit the server refuses some with UNAVAILABLE: share more calls among connections."""
    receive_seconds: float = Field(default=20.0, gt=0)
    """How long the request of a call may take to arrive."""
    receive_budget_bytes: int = Field(default=512 * MIB, ge=1)
    """Bytes of requests that are received at once, each counted as the largest that is allowed, because its size is not
    known before; at least one request, a quarter of the budget per caller. Further ones wait for receive_seconds."""


class TransportSettings(Settings):
    """How bytes leave the server."""

    chunk_bytes: int = Field(default=512 * 1024, ge=65_536, le=4 * MIB)
    """Size of a chunk unless the client asks for another; 256 KiB to 1 MiB is best."""
    zstd: bool = True
    """Compress tensors for clients that ask for it."""
    pack_ids: bool = True
    """Send top-k ids in 18 bits; off, in 32: 40 % more bytes at K = 64 and a little less processor time on both sides,
    for links that carry more than the clients can decode."""


class SecuritySettings(Settings):
    """Who may connect and what they may do."""

    allow_insecure: bool = False
    """Listen without TLS beyond loopback. Everyone on that network can then read the traffic and use the teachers."""
    tls_cert: Path | None = None
    """PEM certificate chain of the server; read again when it changes."""
    tls_key: Path | None = None
    """PEM key of the server."""
    client_ca: Path | None = None
    """PEM authorities of client certificates: turns on mutual TLS."""
    tokens: Path | None = None
    """YAML list of bearer tokens with name, token or sha256, and scopes (score, admin); read again when it changes."""
    trust_remote_code: tuple[str, ...] = ()
    """Models whose own code may run, each as MODEL@REVISION with a full commit hash."""

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
    """Name in the engine registry."""
    device: str = "auto"
    """Device of the models, for example cpu or cuda:0."""
    dtype: str = "auto"
    """Compute dtype: f32, bf16, f16, or auto."""
    deterministic: bool = False
    """Make a row's numbers independent of its batch, to the bit: slower on a GPU, and prompts are not shared."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further keyword arguments of the engine class."""
    memory_budget_bytes: int = Field(default=0, ge=0)
    """Bytes of weights that may be awake at once, as allocated; beyond, the least recently used teacher sleeps. 0 means
    no limit."""
    on_failure: Literal["exit", "restart"] = "exit"
    """What happens when an engine is dead: the process exits non-zero, or the teacher is loaded again."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one teacher before the process exits after all."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """An engine that works on one batch for longer than this is stuck, and the process exits."""
    load_seconds: float = Field(default=1800.0, gt=0)
    """How long reading a model may take, and waiting for another one to be read. A model that takes longer is given up,
    and since nothing can interrupt its reading, no other is read until it ends."""
    self_test: bool = True
    """Score a short sequence twice before a teacher is called ready."""


class LogSettings(Settings):
    """What is written to standard error, one JSON object a line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    requests: bool = False
    """Write a line for every finished request; refused and failed ones are always written."""
    tracing: bool = False
    """Export OpenTelemetry spans; needs the extra otel, configured by the standard OTEL_* variables."""
    prompts: bool = False
    """Write token ids of failed requests. They are user data: leave it off unless you debug."""


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
    """How long calls in flight may take after SIGTERM."""
    settle_seconds: float = Field(default=0.5, ge=0)
    """How long new calls are still accepted after health says NOT_SERVING, so that clients can go elsewhere."""
    limits: LimitSettings = LimitSettings()
    """Bounds and budgets."""
    calls: OpenCallSettings = OpenCallSettings()
    """Open calls and the receiving of requests."""
    transport: TransportSettings = TransportSettings()
    """Chunks and compression."""
    security: SecuritySettings = SecuritySettings()
    """TLS, tokens, scopes."""
    engine: TeacherEngineSettings = TeacherEngineSettings()
    """Engines and residency."""
    log: LogSettings = LogSettings()
    """Logs."""
    fault: str = ""
    """Faults to inject, for chaos tests; see `teacher_server.faults`."""
