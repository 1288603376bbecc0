"""OpenTelemetry: where spans go, and their context on the wire, W3C `traceparent` in the metadata of a call.

The package is optional (extra `otel`): only `otlp_provider` imports it, and only a program that imported it has a span
to pass on.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any

from opd.errors import ConfigError

TRACEPARENT = "traceparent"
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
