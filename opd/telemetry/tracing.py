"""Where OpenTelemetry spans go: an OTLP endpoint named by the standard OTEL_* variables. Needs the extra `otel`."""

from typing import Any

from opd.errors import ConfigError


def otlp_provider(service: str) -> Any:
    """A tracer provider that exports spans of `service` in the background; its `shutdown` sends what waits.

    Raises:
        ConfigError: when the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"tracing needs the extra otel: pip install 'opd[otel]' ({error}).") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
