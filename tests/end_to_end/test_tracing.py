"""One trace from the student's step to the engine's forward."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from student.loop import train
from student.recipe import Recipe

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason="the extra otel is not installed")


@pytest.mark.slow
def test_a_steps_trace_reaches_the_engines_forward(
    world: Path, serve: Any, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.extend(request.resource_spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), collector)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.add_insecure_port('127.0.0.1:0')}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    collector.start()
    try:
        server = serve("--model", f"teacher={world / 'teacher'}", "--tracing")
        train(
            make_recipe(tracing=True, train={"steps": 2}, eval={"prompts": 0}, teachers={"endpoints": [server.address]})
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        collector.stop(None)
    spans = [span for part in received for scope in part.scope_spans for span in scope.spans]
    steps = [span.trace_id for span in spans if span.name == "opd.step"]
    forwards = {span.trace_id for span in spans if span.name == "engine.forward"}
    assert len(set(steps)) == 2 and set(steps) <= forwards
    for trace in steps:
        names = {span.name for span in spans if span.trace_id == trace}
        assert {"opd.step", "rollout", "wait_teacher", "learn", "opd.score", "queue", "engine.forward"} <= names
