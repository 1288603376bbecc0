"""OpenTelemetry spans of a Score call: one for the call, and one for each wait and each forward pass of its sequences.

Spans are written after the call, from clock readings that are taken anyway, so that tracing costs nothing during it.
Needs the extra `otel`; the standard OTEL_* variables configure the exporter.
"""

import time
from collections.abc import Sequence
from typing import Any

from opd.telemetry.tracing import otlp_provider, traceparent_of
from opd.wire.types import Timings
from teacher_server.batching.queue import JobTimes

SERVICE_NAME = "opd-teacher"


class Tracing:
    """Writes spans.

    Args:
        provider: an OpenTelemetry tracer provider.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("opd.teacher_server")
        # One offset turns all monotonic readings into wall-clock nanoseconds, so that spans keep their relative
        # positions.
        self._offset = time.time_ns() - int(time.monotonic() * 1e9)

    def record(
        self,
        metadata: Any,
        *,
        name: str,
        arrived: float,
        ended: float,
        attributes: dict[str, Any],
        jobs: Sequence[JobTimes] = (),
        timings: Timings | None = None,
        error: str = "",
    ) -> None:
        """Write the spans of a finished call, as children of the caller's span.

        Args:
            metadata: the call's metadata, with its `traceparent`.
            name: name of the call's span.
            arrived: when the call came in, in monotonic seconds.
            ended: when it ended, in monotonic seconds.
            attributes: attributes of the call's span: strings and numbers, never prompts.
            jobs: the sequences that the engine has begun, including those that have not ended.
            timings: added as attributes, in seconds.
            error: why the call failed; "" if it did not.
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
            # The jobs of a batch share one forward pass, which becomes one span.
            times = job.started_at, job.ended_at or ended
            forwards[times] = forwards.get(times, 0) + job.tokens
        for (started, done), tokens in forwards.items():
            self._child("engine.forward", inside, started, done, {"opd.tokens": tokens})
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._wall(ended))

    def close(self) -> None:
        """Export the remaining spans; may take seconds if the collector does not respond."""
        self._provider.shutdown()

    def _child(self, name: str, context: Any, start: float, end: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(name, context=context, start_time=self._wall(start), attributes=attributes)
        span.end(self._wall(max(end, start)))

    def _wall(self, monotonic: float) -> int:
        return self._offset + int(monotonic * 1e9)


def tracing_from_environment() -> Tracing:
    """Tracing to the OTLP endpoint that the OTEL_* variables name.

    Raises:
        ConfigError: if the extra is not installed.
    """
    return Tracing(otlp_provider(SERVICE_NAME))


def _parent(metadata: Any) -> Any:
    traceparent = traceparent_of(metadata)
    if not traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
