"""OpenTelemetry spans of a Score call: one for the call, one for each wait and each forward of its sequences.

Spans are written after the call, from the clock readings it takes anyway, so that tracing costs nothing on the way.
Needs the extra `otel`; the exporter is configured by the standard OTEL_* variables.
"""

import time
from collections.abc import Sequence
from typing import Any

from opd.telemetry.tracing import otlp_provider, traceparent_of
from opd.wire.types import Timings
from teacher_server.batching.queue import SequenceJob

SERVICE_NAME = "opd-teacher"


class Tracing:
    """Writes spans.

    Args:
        provider: an OpenTelemetry tracer provider.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("opd.teacher_server")
        # Monotonic readings become wall-clock nanoseconds by one offset, so that spans never overlap falsely.
        self._offset = time.time_ns() - int(time.monotonic() * 1e9)

    def record(
        self,
        metadata: Any,
        *,
        name: str,
        arrived: float,
        ended: float,
        attributes: dict[str, Any],
        jobs: Sequence[SequenceJob] = (),
        timings: Timings | None = None,
        error: str = "",
    ) -> None:
        """Write the spans of a finished call as children of the caller's.

        Args:
            metadata: of the call, with its `traceparent`.
            name: of the call's span.
            arrived: seconds, monotonic.
            ended: seconds, monotonic.
            attributes: of the call's span; strings and numbers, never prompts.
            jobs: the sequences that the engine has begun, those of them that have not ended too.
            timings: added as attributes, seconds.
            error: why it failed, "" when it did not.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        attributes = dict(attributes)
        if timings is not None:
            for part in ("admission", "queue", "batch_wait", "engine", "encode", "send", "total"):
                attributes[f"opd.{part}_seconds"] = getattr(timings, part)
        span = self._tracer.start_span(
            name,
            context=_parent(metadata),
            kind=SpanKind.SERVER,
            start_time=self._wall(arrived),
            attributes=attributes,
        )
        inside = set_span_in_context(span)
        forwards: dict[tuple[float, float], int] = {}
        for job in jobs:
            self._child("queue", inside, job.queued_at, job.picked_at, {"opd.tokens": job.tokens})
            # Jobs of one batch have one forward, and it is drawn once.
            times = job.started_at, job.ended_at or ended
            forwards[times] = forwards.get(times, 0) + job.tokens
        for (started, done), tokens in forwards.items():
            self._child("engine.forward", inside, started, done, {"opd.tokens": tokens})
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._wall(ended))

    def close(self) -> None:
        """Export what waits to be exported; may take seconds where the collector does not answer."""
        self._provider.shutdown()

    def _child(self, name: str, context: Any, start: float, end: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(name, context=context, start_time=self._wall(start), attributes=attributes)
        span.end(self._wall(max(end, start)))

    def _wall(self, monotonic: float) -> int:
        return self._offset + int(monotonic * 1e9)


def tracing_from_environment() -> Tracing:
    """Spans to the OTLP endpoint that the OTEL_* variables name.

    Raises:
        ConfigError: when the extra is not installed.
    """
    return Tracing(otlp_provider(SERVICE_NAME))


def _parent(metadata: Any) -> Any:
    traceparent = traceparent_of(metadata)
    if not traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
