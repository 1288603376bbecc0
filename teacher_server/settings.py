"""Every setting of a teacher server, grouped by purpose; the flags of `opd serve` are these fields."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from opd.config.base import Settings

MIB = 1024 * 1024


class LimitSettings(Settings):
    """What one request may ask for, and how much the server accepts at once."""

    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens per engine batch, prompts and responses together; a longer sequence runs in a batch of its own.
    Lower it if the device runs out of memory."""
    max_batch_sequences: int = Field(default=256, ge=1)
    """Maximum sequences per engine batch."""
    max_tokens_in_flight: int = Field(default=262_144, ge=1)
    """Maximum tokens of all requests that are queued or running. A request that would exceed it is refused with
    RESOURCE_EXHAUSTED and told when to retry."""
    max_reply_bytes_in_flight: int = Field(default=1024 * MIB, ge=1)
    """Maximum bytes of accepted requests, with the ids that they unpack to, and of scores that were accepted to be
    computed and are not sent yet, with the chunks on their way. A request that would exceed it is refused with
    RESOURCE_EXHAUSTED. It bounds the memory that requests and replies take."""
    stream_window_bytes: int = Field(default=32 * MIB, ge=1)
    """Maximum bytes of scores that the server computes ahead of what a call's reader has taken; one sequence is always
    allowed."""
    max_client_share: float = Field(default=0.75, gt=0, le=1)
    """Share of max_tokens_in_flight and max_reply_bytes_in_flight that one principal (a token's name, or an address if
    there are no tokens) may hold, so that room stays for others; its first request may exceed the share. A client name
    within a principal may hold this share of the principal's share."""
    max_sequence_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a sequence, prompt and response together; 0 means the engine's limit."""
    max_k: int = Field(default=1024, ge=1)
    """Maximum k, the number of ids per response token, that a request with payload topk or gather may ask for."""
    max_sequences: int = Field(default=256, ge=1)
    """Maximum sequences per request."""
    max_request_tokens: int = Field(default=262_144, ge=2)
    """Maximum tokens per request, all its sequences together; max_tokens_in_flight applies instead if it is smaller."""
    max_request_bytes: int = Field(default=32 * MIB, ge=1024)
    """Maximum size of a request message in bytes."""
    max_request_seconds: float = Field(default=600.0, gt=0)
    """Deadline in seconds of requests that set none; a longer deadline is shortened to it."""
    send_timeout_seconds: float = Field(default=120.0, gt=0)
    """Seconds that a call waits for its reader to take a message; after that the call fails, and its share of the
    budgets is released."""
    allow_full: bool = False
    """Allow the payload full, which sends the logits over the whole vocabulary; meant for tests."""


class OpenCallSettings(Settings):
    """How many calls may be open, and how much memory and time receiving their requests may take."""

    max_calls: int = Field(default=1024, ge=1)
    """Maximum open calls of all authorised callers together; on a server without tokens every caller is authorised."""
    max_caller_share: float = Field(default=0.5, gt=0, le=1)
    """Share of max_calls that one caller may hold; a caller is a token's name, or an address if there are no tokens."""
    max_unauthenticated_calls: int = Field(default=64, ge=4)
    """Maximum open health checks of callers without a token. They do not count against max_calls, and one address may
    hold a quarter of them."""
    max_watches: int = Field(default=32, ge=4)
    """Maximum open health watches (streams of the health status) of callers without a token. They do not count against
    max_calls, and one address may hold a quarter of them."""
    watch_seconds: float = Field(default=3600.0, gt=0)
    """Seconds after which the server ends a health watch; a client that still needs the status opens another."""
    max_streams_per_connection: int = Field(default=256, ge=1)
    """Maximum open calls per connection. A gRPC client holds further calls back, but while a connection stays at the
    limit the server may refuse some calls with UNAVAILABLE; use several connections for more calls."""
    receive_seconds: float = Field(default=20.0, gt=0)
    """Seconds within which the request message of a call must arrive, waiting for receive_budget_bytes included."""
    receive_budget_bytes: int = Field(default=512 * MIB, ge=1)
    """Maximum bytes of requests that are being received at once, of which one caller may use a quarter; one request is
    always allowed. Every request counts as max_request_bytes, because gRPC does not announce its size. Further requests
    wait for up to receive_seconds."""


class TransportSettings(Settings):
    """How replies are sent."""

    chunk_bytes: int = Field(default=512 * 1024, ge=65_536, le=4 * MIB)
    """Chunk size of replies in bytes, unless the client asks for another; 256 KiB to 1 MiB is fastest."""
    zstd: bool = True
    """Compress tensors with zstd for clients that ask for it."""
    pack_ids: bool = True
    """Send top-k ids in 18 bits each. With false they take 32 bits, which makes a reply 40 % larger at k = 64 and saves
    a little CPU time on both sides; choose it if decoding, not the network, limits the clients."""


class HttpSettings(Settings):
    """The HTTP door for trainers that speak to vLLM's or SGLang's server; needs the extra http."""

    port: int = Field(default=-1, ge=-1, le=65_535)
    """Port of the HTTP door, on the host of the gRPC service and with its TLS files and tokens; 0 picks a free one, -1
    leaves it closed."""
    max_connections: int = Field(default=512, ge=1)
    """Maximum open connections; further ones are closed at once. Their calls count against the limits of all calls."""


class SecuritySettings(Settings):
    """Who may connect and what they may do."""

    allow_insecure: bool = False
    """Allow a host other than loopback without TLS. Everyone on that network can then read the traffic, tokens
    included, and so use the teachers."""
    tls_cert: Path | None = None
    """PEM file with the server's certificate chain; turns on TLS and is reloaded when it changes."""
    tls_key: Path | None = None
    """PEM file with the private key of tls_cert."""
    client_ca: Path | None = None
    """PEM file with the certificate authorities that sign client certificates; turns on mutual TLS."""
    tokens: Path | None = None
    """YAML file that lists bearer tokens, each with a name, token or sha256, and scopes (score, admin); reloaded when
    it changes. Without it no token is needed to score, and AdminService is closed."""
    trust_remote_code: tuple[str, ...] = ()
    """Models whose own code may run, each as MODEL@REVISION with a commit hash of 40 hex digits."""

    @model_validator(mode="after")
    def _complete(self) -> "SecuritySettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; set both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca turns on mutual TLS, which needs tls_cert and tls_key; set both")
        return self


class TeacherEngineSettings(Settings):
    """How teachers are run."""

    engine: str = "transformers"
    """Engine that runs the teachers: transformers, vllm, sglang or a registered name."""
    device: str = "auto"
    """Device of the models, for example cpu or cuda:0; auto takes a GPU if there is one, else the CPU."""
    dtype: str = "auto"
    """Dtype in which the models compute: f32, bf16 or f16; auto takes the checkpoint's on a GPU and f32 on a CPU."""
    deterministic: bool = False
    """Give a sequence the same scores bit for bit, whatever it is batched with. This is slower on a GPU, and rows with
    the same prompt do not share its computation."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further keyword arguments of the engine class, by name."""
    memory_budget_bytes: int = Field(default=0, ge=0)
    """Maximum bytes of weights on the device, all teachers together. When a teacher does not fit, the least recently
    used idle ones are put to sleep. 0 means no limit."""
    on_failure: Literal["exit", "restart"] = "exit"
    """What happens when an engine dies: exit ends the process with exit code 20, restart loads the teacher again."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum restarts of one teacher under on_failure: restart; at the next failure the process exits."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """Seconds that one engine batch may take; after that the engine counts as stuck and the process exits."""
    load_seconds: float = Field(default=1800.0, gt=0)
    """Maximum seconds to load a model, and to wait while another one loads. A slower model is given up; since loading
    cannot be interrupted, no other model is loaded until it ends."""
    self_test: bool = True
    """Score a short sequence twice and compare the results before a teacher counts as ready."""


class LogSettings(Settings):
    """What is logged to standard error."""

    format: Literal["json", "text"] = "json"
    """One JSON object per line, or lines of text."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    requests: bool = False
    """Log every Score call that ends; failed ones are logged in any case, those refused for overload at level
    debug."""
    tracing: bool = False
    """Export OpenTelemetry spans, configured by the standard OTEL_* environment variables; needs the extra otel."""
    prompts: bool = False
    """Log the token ids of refused and failed requests. They are user data, so leave this off unless you are
    debugging."""


class ServerSettings(Settings):
    """A teacher server."""

    host: str = "127.0.0.1"
    """Address on which the service listens."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port of the gRPC service; 0 picks a free one."""
    metrics_port: int = Field(default=0, ge=-1, le=65_535)
    """Port of /metrics and /healthz over HTTP; 0 picks a free one, -1 turns them off."""
    metrics_host: str = "127.0.0.1"
    """Address on which /metrics listens. It is never encrypted and asks for no token."""
    grace_seconds: float = Field(default=120.0, ge=0)
    """Seconds that calls in flight have to finish after SIGTERM; then they are cut off."""
    settle_seconds: float = Field(default=0.5, ge=0)
    """Seconds after SIGTERM during which new calls are still accepted, so that clients have time to notice that health
    reports NOT_SERVING."""
    limits: LimitSettings = LimitSettings()
    """Limits on one request, and on what the server accepts at once."""
    calls: OpenCallSettings = OpenCallSettings()
    """Limits on open calls and on requests that are being received."""
    http: HttpSettings = HttpSettings()
    """The HTTP door."""
    transport: TransportSettings = TransportSettings()
    """How replies are chunked and compressed."""
    security: SecuritySettings = SecuritySettings()
    """TLS, bearer tokens and their scopes."""
    engine: TeacherEngineSettings = TeacherEngineSettings()
    """How teachers are run: engine, device, memory and restarts."""
    log: LogSettings = LogSettings()
    """What is logged."""
