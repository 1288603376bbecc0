"""Prometheus series of a teacher server, with the prefix opd_teacher_, base units and bounded labels.

Label values are the names of served teachers, payload kinds, status codes, stages and the like; never a client, a
request or an address.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from opd.telemetry.metrics_http import describe_process
from opd.wire.types import Timings

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
POWERS_OF_TWO = tuple(2.0**n for n in range(19))
STAGES = ("admission", "queue", "batch_wait", "engine", "encode", "send")

REFUSALS = ("caller_full", "server_full", "receive_timeout", "receive_full", "no_request", "oversize", "fields")


class ServerMetrics:
    """All series of one server, in a registry of their own, so that a process can hold several servers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        describe_process(registry)
        t = ("teacher",)

        def counter(name: str, text: str, labels: Iterable[str] = t) -> Counter:
            return Counter(f"opd_teacher_{name}", text, tuple(labels), registry=registry)

        def gauge(name: str, text: str, labels: Iterable[str] = t) -> Gauge:
            return Gauge(f"opd_teacher_{name}", text, tuple(labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = t) -> Histogram:
            return Histogram(f"opd_teacher_{name}", text, tuple(labels), buckets=buckets, registry=registry)

        self.requests = counter(
            "requests", "Score calls that ended, by gRPC status code.", ("teacher", "payload", "code")
        )
        self.rejections = counter(
            "rejections",
            "Score calls that failed before the engine ran any of their sequences, by class of the error.",
            ("teacher", "reason"),
        )
        self.duration = histogram(
            "request_duration_seconds",
            "Seconds from the arrival of a successful Score call to its trailer.",
            SECONDS,
            ("teacher", "payload"),
        )
        self.stage = histogram(
            "stage_duration_seconds",
            "Seconds that a successful Score call spent in each stage; the stages add up to its duration.",
            SECONDS,
            ("teacher", "stage"),
        )
        self.model_tokens = counter(
            "model_tokens", "Prompt and response tokens of the sequences that the engine scored."
        )
        self.scored_tokens = counter("scored_tokens", "Response tokens whose scores were sent.", ("teacher", "payload"))
        self.sent_bytes = counter("sent_bytes", "Bytes of score tensors sent, after compression.")
        self.batches = counter("batches", "Batches that the engine ran.")
        self.engine_seconds = counter("engine_busy_seconds", "Seconds that the engine spent running batches.")
        self.batch_sequences = histogram(
            "batch_sequences", "Sequences that the engine scored in a batch.", POWERS_OF_TWO[:11]
        )
        self.batch_tokens = histogram(
            "batch_tokens",
            "Prompt and response tokens of the sequences that the engine scored in a batch.",
            POWERS_OF_TWO,
        )
        self.queued_sequences = gauge("queued_sequences", "Sequences waiting for the engine.")
        self.queued_tokens = gauge(
            "queued_tokens", "Prompt and response tokens of the sequences waiting for the engine."
        )
        self.running_tokens = gauge(
            "running_tokens", "Prompt and response tokens of the batch that the engine is running."
        )
        self.token_rate = gauge(
            "tokens_per_second", "Moving average of the engine's throughput, in prompt and response tokens per second."
        )
        self.load = (self.queued_sequences, self.queued_tokens, self.running_tokens, self.token_rate)
        self.state = gauge(
            "state", "1 for the state that a teacher is in, 0 for the other states.", ("teacher", "state")
        )
        self.restarts = counter("restarts", "Times that a teacher was loaded again after its engine died.")
        self.weight_updates = counter("weight_updates", "Times that a teacher's weights were replaced in place.")
        self.weights_info = gauge(
            "weights_info",
            "1 for the weights that a teacher uses, with their hash and the engine as labels.",
            ("teacher", "weights_hash", "engine"),
        )
        self.calls = gauge("calls", "Score calls in flight.", ())
        self.used_tokens = gauge("used_tokens", "Tokens reserved by Score calls in flight.", ())
        self.budget_tokens = gauge(
            "budget_tokens", "Maximum tokens that calls may reserve at once (limits.max_tokens_in_flight).", ()
        )
        self.used_reply_bytes = gauge(
            "used_reply_bytes", "Bytes of requests and scores reserved by Score calls in flight.", ()
        )
        self.budget_reply_bytes = gauge(
            "budget_reply_bytes",
            "Maximum bytes of requests and scores that calls may reserve at once (limits.max_reply_bytes_in_flight).",
            (),
        )
        self.auth_failures = counter(
            "auth_failures",
            "Calls refused for their credentials: token (missing or unknown) or scope (lacking).",
            ("reason",),
        )
        self.refused_calls = counter(
            "refused_calls", "Calls refused before their request was parsed, by reason.", ("reason",)
        )
        # A series that appears only with its first event shows no increase then, and an alert would miss the event.
        for reason in REFUSALS:
            self.refused_calls.labels(reason)
        for reason in ("token", "scope"):
            self.auth_failures.labels(reason)
        self.open_calls = gauge(
            "open_calls",
            "Open calls of all methods: authorised, unauthenticated (health checks) and watches (health watches).",
            ("callers",),
        )
        self.receiving = gauge("receiving_requests", "Requests being received or parsed.", ())
        self.unexpected_errors = counter(
            "unexpected_errors", "Calls that ended with an unexpected error; the server's log has its traceback.", ()
        )
        self.loop_lag = gauge(
            "event_loop_lag_seconds",
            "Seconds by which the event loop was late at the last check, made once a second.",
            (),
        )
        self.tasks = gauge("tasks", "Asyncio tasks that exist in the event loop.", ())
        self.draining = gauge("draining", "1 while the server drains before it exits, else 0.", ())

    def observe_timings(self, teacher: str, payload: str, timings: Timings) -> None:
        """Record where the time of a finished call went."""
        self.duration.labels(teacher, payload).observe(timings.total)
        for stage in STAGES:
            self.stage.labels(teacher, stage).observe(getattr(timings, stage))

    def observe_batch(self, teacher: str, sequences: int, tokens: int, seconds: float) -> None:
        """Record an engine batch."""
        self.batches.labels(teacher).inc()
        self.model_tokens.labels(teacher).inc(tokens)
        self.engine_seconds.labels(teacher).inc(seconds)
        self.batch_sequences.labels(teacher).observe(sequences)
        self.batch_tokens.labels(teacher).observe(tokens)
