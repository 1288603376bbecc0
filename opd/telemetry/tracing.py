"""Spans: what ran when, for OpenTelemetry and for a run's timeline, and their context on the wire.

The context is W3C `traceparent` in the metadata of a call. OpenTelemetry is optional (extra `otel`): only `Spans` with
a provider imports it, and only a program that imported it has a span to pass on.
"""

import contextlib
import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opd.errors import ConfigError
from opd.files import write_whole

TRACEPARENT = "traceparent"
Attributes = Mapping[str, str | int | float]
TRACKS = ("learner", "sampler", "teachers")
LIMIT = 20_000
"""Number of the newest events that are kept, about 2.5 MB."""
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that makes the server's spans children of the present one; () without OpenTelemetry or a span."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    context = sys.modules["opentelemetry.trace"].get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    return ((TRACEPARENT, f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"),)


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The `traceparent` in a call's metadata, "" when there is none or it is malformed."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""


def trace_id_of(traceparent: str) -> str:
    """The trace id in a `traceparent`, "" for ""."""
    match = _FORM.fullmatch(traceparent)
    return match[1] if match else ""


def parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Any:
    """The caller's span in a call's metadata, as a parent for `Spans.add`; None when there is none."""
    traceparent = traceparent_of(metadata)
    if not traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent})


class Timeline:
    """The spans of a run's tracks, as a Chrome trace: open timeline.json in https://ui.perfetto.dev or chrome://tracing.

        learner   the stages of a step: rollout or wait_rollout, wait_teacher, learn, after_update, evaluate, checkpoint
        sampler   the steps that are sampled ahead at the same time (train.max_staleness)
        teachers  from the first row of a step that is sent to be scored to the last answer

    If the learner's track is mostly waits, the track that it waits for is the bottleneck.

    Args:
        path: timeline.json, which is continued if the run is resumed; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        # Spans are measured by the monotonic clock, and written in wall-clock time, which a resumed run shares.
        self._epoch = time.time() - time.monotonic()
        self._events: deque[dict[str, Any]] = deque(maxlen=LIMIT)
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, KeyError, OSError):  # cut short by a kill
                old = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
                self._events.extend(event for event in old if event["ph"] == "X")

    def add(self, track: str, name: str, begin: float, end: float, attributes: Attributes) -> None:
        """Add a span to a track; times are seconds of `time.monotonic()`."""
        if self._path is None:
            return
        start = round(1e6 * (self._epoch + begin))
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start,
                "dur": round(1e6 * (end - begin)),
                "pid": 0,
                "tid": TRACKS.index(track),
                "args": dict(attributes),
            }
        )

    def write(self) -> None:
        """Write the file; errors are ignored, because a missing picture must not end a run."""
        if self._path is None:
            return
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(TRACKS)
        ]
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"traceEvents": [*names, *self._events]}))


class Spans:
    """Writes spans to OpenTelemetry, to a timeline, to both or to neither.

    Args:
        provider: an OpenTelemetry tracer provider, or None.
        timeline: gets the spans that name one of its tracks; None for no timeline.

    Attributes:
        exported: whether spans go to OpenTelemetry.
    """

    def __init__(self, provider: Any = None, timeline: Timeline | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("opd")
        self._timeline = timeline or Timeline(None)
        self.exported = provider is not None
        # One offset turns all monotonic readings into wall-clock time, so that spans keep their relative positions.
        self._offset = time.time_ns() - int(time.monotonic() * 1e9)

    @classmethod
    def from_environment(cls, service: str, enabled: bool, timeline: Timeline | None = None) -> "Spans":
        """Spans of `service`, if `enabled` to the OTLP endpoint that the OTEL_* variables name.

        Raises:
            ConfigError: if the extra `otel` is not installed.
        """
        return cls(otlp_provider(service) if enabled else None, timeline)

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes, track: str = "") -> Iterator[None]:
        """A span around the block, child of the one around it."""
        begin = time.monotonic()
        here: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._tracer is not None:
            here = self._tracer.start_as_current_span(name, attributes=attributes)
        try:
            with here:
                yield
        finally:
            if track:
                self._timeline.add(track, name, begin, time.monotonic(), attributes)

    def add(
        self,
        name: str,
        begin: float,
        end: float,
        attributes: Attributes,
        *,
        track: str = "",
        parent: Any = None,
        error: str | None = None,
    ) -> Any:
        """Write a span that has ended, from readings of `time.monotonic()`; returns it as a parent for others.

        Args:
            name: what ran.
            begin: when it began, in seconds.
            end: when it ended.
            attributes: strings and numbers, never prompts.
            track: the timeline's track; "" leaves it out there.
            parent: what `add` or `parent_of` returned; None for the present span, if any.
            error: why a call that was served failed, "" if it did not; None for anything but a call.
        """
        if track:
            self._timeline.add(track, name, begin, end, attributes)
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        kind = SpanKind.INTERNAL if error is None else SpanKind.SERVER
        span = self._tracer.start_span(
            name, context=parent, kind=kind, start_time=self._wall(begin), attributes=attributes
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._wall(max(begin, end)))
        return set_span_in_context(span)

    def close(self) -> None:
        """Export the remaining spans; may take seconds if the collector does not answer."""
        if self._provider is not None:
            self._provider.shutdown()

    def _wall(self, monotonic: float) -> int:
        return self._offset + int(monotonic * 1e9)


def otlp_provider(service: str) -> Any:
    """A tracer provider that exports spans of `service` to the endpoint that the standard OTEL_* variables name.

    It does so in the background; its `shutdown` sends what waits.

    Raises:
        ConfigError: if the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing needs the extra otel ({error}); install it with pip install 'opd[otel]'."
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
