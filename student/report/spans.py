"""OpenTelemetry spans of the student: a trace per step, a span per stage.

Rows are submitted to the fleet within them, so the teachers' spans of a step carry the step's trace id.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opd.telemetry.tracing import otlp_provider

SERVICE_NAME = "opd-student"


class Spans:
    """Writes spans, or nothing without a provider.

    Args:
        provider: an OpenTelemetry tracer provider, or None.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("opd.student")

    @classmethod
    def from_environment(cls, enabled: bool) -> "Spans":
        """Spans to the OTLP endpoint that the OTEL_* variables name, if `enabled`.

        Raises:
            ConfigError: when the extra `otel` is not installed.
        """
        return cls(otlp_provider(SERVICE_NAME) if enabled else None)

    @contextmanager
    def span(self, name: str, **attributes: str | int | float) -> Iterator[None]:
        """A span around the block, child of the one around it."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield

    def close(self) -> None:
        """Export pending spans; may take seconds where the collector does not answer."""
        if self._provider is not None:
            self._provider.shutdown()
