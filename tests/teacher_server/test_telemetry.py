"""Metrics by the rules of Prometheus, logs as JSON, spans with one trace id from the caller to the forward."""

import ast
import asyncio
import contextlib
import io
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from prometheus_client import generate_latest
from waiting import EngineGate, until

from opd.telemetry.tracing import Spans, trace_id_of, trace_metadata, traceparent_of
from opd.wire.types import PayloadSpec
from teacher_server.observe import logs
from teacher_server.observe.metrics import ServerMetrics

UNITS = ("_seconds", "_bytes", "_tokens", "_sequences", "_ratio")
COUNTS = {"calls", "open_calls", "receiving_requests", "state", "draining", "tasks"}


def families(metrics: ServerMetrics) -> list[Any]:
    return [f for f in metrics.registry.collect() if not f.name.startswith("process_")]


def test_metric_names_have_our_prefix_base_units_and_help() -> None:
    found = families(ServerMetrics())
    assert len(found) >= 29
    for family in (one for one in found if one.name != "opd_build_info"):
        assert re.fullmatch(r"opd_teacher_[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|us|milliseconds|percent|kb|mb)(_|$)", family.name)
        short = family.name.removeprefix("opd_teacher_")
        if family.type in ("gauge", "histogram"):
            known = short.endswith((*UNITS, "_info", "_per_second")) or short in COUNTS
            assert known, family.name


async def test_labels_are_bounded_whatever_clients_send(start: Any, items: Any) -> None:
    client = await start(log={"level": "error"})
    await client.score(items(1), PayloadSpec.sampled())

    def series() -> list[str]:
        lines = generate_latest(client.server.shared.metrics.registry).decode().splitlines()
        return sorted(line.rpartition(" ")[0] for line in lines)

    async def hostile(number: int) -> None:
        with pytest.raises(grpc.RpcError):
            await client.score(items(1), PayloadSpec.sampled(), client=f"c{number}", expected_weights_hash=f"h{number}")
        request = client.server.shared  # unknown teachers must not become labels
        assert request is not None
        from opd.wire.request import build_score_request

        with pytest.raises(grpc.RpcError):
            message = build_score_request(items(1), PayloadSpec.sampled(), teacher=f"t{number}", request_id="r")
            async for _ in client.stub.Score(message):
                pass

    await hostile(0)
    await client.settled()
    # The last gauge that the server's own watch sets, now and then.
    await until(lambda: any(line.startswith("opd_teacher_tokens_per_second{") for line in series()))
    before = series()
    for number in range(1, 20):
        await hostile(number)
    await client.settled()
    assert series() == before


async def test_stage_times_and_tokens_are_counted(start: Any, items: Any) -> None:
    client = await start()
    await client.score(items(3), PayloadSpec.topk(4))
    await client.settled()
    text = generate_latest(client.server.shared.metrics.registry).decode()
    assert 'opd_teacher_model_tokens_total{teacher="t"} 30.0' in text
    assert 'opd_teacher_request_duration_seconds_count{payload="topk",teacher="t"} 1.0' in text
    for stage in ("admission", "queue", "batch_wait", "engine", "encode", "send"):
        assert f'opd_teacher_stage_duration_seconds_count{{stage="{stage}",teacher="t"}} 1.0' in text
    assert 'opd_teacher_weights_info{engine="numpy 1"' in text


async def test_a_call_that_fails_in_the_engine_is_none_refused_before_it(start: Any, items: Any, recorder: Any) -> None:
    client = await start()
    client.server.shared.spans = Spans(recorder)
    client.engines["numpy"].before_score = lambda batch: (_ for _ in ()).throw(ValueError("odd shape"))

    async def rejections(**options: Any) -> list[float]:
        with pytest.raises(grpc.RpcError):
            await client.score(items(1), PayloadSpec.sampled(), **options)
        await client.settled()
        (family,) = client.server.shared.metrics.rejections.collect()
        return [sample.value for sample in family.samples if sample.name.endswith("_total")]

    assert await rejections() == []
    assert [span.name for span in recorder.exporter.get_finished_spans()] == ["opd.score", "queue", "engine.forward"]
    assert await rejections(expected_weights_hash="of others") == [1.0]


async def test_a_teacher_that_is_unloaded_leaves_no_queue_in_the_metrics(start: Any, items: Any) -> None:
    client = await start({"t": "numpy", "u": "second"})
    registry = client.server.shared.metrics.registry
    client.engines["second"].before_score = gate = EngineGate()
    spec = PayloadSpec.sampled()
    calls = [asyncio.create_task(client.score(items(1), spec, teacher="u"))]
    await until(lambda: gate.held)
    calls.append(asyncio.create_task(client.score(items(3, seed=1), spec, teacher="u")))

    def queued() -> float | None:
        return registry.get_sample_value("opd_teacher_queued_tokens", {"teacher": "u"})

    await until(queued)
    unloading = asyncio.create_task(client.server.shared.teachers.unload("u", 0.0))
    gate.open()
    await unloading
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: queued() is None)
    for name in ("queued_sequences", "running_tokens", "tokens_per_second"):
        assert registry.get_sample_value(f"opd_teacher_{name}", {"teacher": "u"}) is None


@pytest.fixture
def configured() -> Iterator[Callable[[str, Any], logging.Logger]]:
    """`configured(level, stream)` sets logging up as `opd serve` does; what was there before comes back at the end."""
    root, server = logging.getLogger(), logging.getLogger(logs.LOGGER)
    handlers, levels, raises = root.handlers[:], (root.level, server.level), logging.raiseExceptions

    def run(level: str, stream: Any) -> logging.Logger:
        root.handlers[:] = []  # pytest's own must outlive this
        logs.configure(level, stream)
        return logging.getLogger(f"{logs.LOGGER}.test")

    yield run
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    server.setLevel(levels[1])
    logging.raiseExceptions = raises


def test_log_lines_are_json_and_cannot_be_forged(configured: Any) -> None:
    stream = io.StringIO()
    log = configured("info", stream)
    forged = 'x"}\n{"level": "error"'
    log.info("hello", extra={"request_id": forged, "count": 3, "flag": True, "value": ValueError("no")})
    log.debug("hidden")
    logging.getLogger("some.library").info("hidden too")
    logging.getLogger("some.library").warning("shown: %s", "\n")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "message": "hello",
        "request_id": forged,
        "count": 3,
        "flag": True,
        "value": "no",
    }
    assert (second["level"], second["message"]) == ("warning", "shown: \n")


def test_a_caller_that_has_left_writes_no_traceback_and_a_fault_of_the_library_does(configured: Any) -> None:
    stream = io.StringIO()
    configured("info", stream)
    for kind in (cygrpc.ExecuteBatchError, cygrpc.UsageError):
        try:
            raise kind("as grpcio raises it")
        except Exception:
            logging.getLogger(cygrpc.__name__).exception("raised in core by servicer method")
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert "UsageError" in line["trace"]


def test_a_log_that_cannot_be_written_costs_no_answer(configured: Any, capfd: pytest.CaptureFixture[str]) -> None:
    closed = io.StringIO()
    closed.close()
    with open("/dev/full", "w") as full:
        for stream in (full, closed):
            configured("info", stream).info("hello")
        with contextlib.suppress(OSError):
            full.close()  # what it holds cannot be written either
    assert capfd.readouterr().err == ""


def test_every_message_and_field_of_the_log_is_documented() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "server.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \|(.*)\|$", page, re.M))
    found = 0
    for file in (root / "teacher_server").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("_log.")):
                continue
            message = next(a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
            if "engines" in file.parts:
                continue  # sentences of an engine, without fields
            assert message in rows, f"{file}: {message}"
            keys = [key.value for d in ast.walk(call) if isinstance(d, ast.Dict) for key in d.keys if key is not None]
            assert all(f"`{key}`" in rows[message] for key in keys), f"{file}: {message} {keys}"
            found += 1
    assert found > 15


@pytest.fixture
def recorder() -> Any:
    """A tracer provider whose finished spans can be read."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(provider.exporter))
    return provider


async def test_one_trace_id_from_the_caller_to_the_forward(start: Any, items: Any, recorder: Any) -> None:
    from opentelemetry import trace

    from opd.wire.request import build_score_request

    client = await start()
    client.server.shared.spans = Spans(recorder)
    client.engines["numpy"].seconds_per_batch = 0.02
    with recorder.get_tracer("student").start_as_current_span("step") as step:
        metadata = trace_metadata()
        assert trace.get_current_span() is step
        message = build_score_request(items(2), PayloadSpec.sampled(), teacher="t", request_id="r7")
        async for _ in client.stub.Score(message, metadata=metadata):
            pass
    await client.settled()
    spans = {span.name: span for span in recorder.exporter.get_finished_spans()}
    assert set(spans) == {"step", "opd.score", "queue", "engine.forward"}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    score, forward = spans["opd.score"], spans["engine.forward"]
    assert score.parent.span_id == spans["step"].context.span_id
    assert forward.parent.span_id == score.context.span_id
    assert score.attributes["opd.request_id"] == "r7"
    assert score.start_time <= forward.start_time <= forward.end_time <= score.end_time
    assert (forward.end_time - forward.start_time) / 1e9 >= 0.019
    assert score.attributes["opd.engine_seconds"] >= 0.019
    assert not any("token_id" in key for span in spans.values() for key in span.attributes or ())


async def test_the_span_of_whoever_submits_a_row_to_the_fleet_is_the_servers_parent(
    start: Any, items: Any, recorder: Any
) -> None:
    from opd.fleet.client import TeacherFleet

    client = await start()
    client.server.shared.spans = Spans(recorder)

    def student() -> None:
        tracer = recorder.get_tracer("student")
        with TeacherFleet.connect(client.address) as fleet:
            for name in ("first", "second"):
                with tracer.start_as_current_span(name):
                    futures = fleet.submit_many("t", items(2), PayloadSpec.sampled())
                fleet.wait(futures)  # outside: what counts is where the rows were submitted
            fleet.score("t", items(1), PayloadSpec.sampled())

    await asyncio.to_thread(student)
    await client.settled()
    spans = recorder.exporter.get_finished_spans()
    calls = [span for span in spans if span.name == "opd.score" and "probe" not in span.attributes["opd.request_id"]]
    steps = {span.context.span_id: span for span in spans if span.name in ("first", "second")}
    parents = [steps[call.parent.span_id].name if call.parent else "" for call in calls]
    assert sorted(set(parents)) == ["", "first", "second"] and parents[-1] == ""
    for call in calls:
        forwards = [s for s in spans if s.name == "engine.forward" and s.parent.span_id == call.context.span_id]
        assert forwards and {f.context.trace_id for f in forwards} == {call.context.trace_id}
        if call.parent:
            assert call.context.trace_id == steps[call.parent.span_id].context.trace_id


def test_a_server_exports_its_spans_to_a_collector(launch: Any, items: Any, collector: Any) -> None:
    from opd.wire.request import build_score_request
    from opd.wire.v1 import teacher_pb2_grpc

    process = launch("--tracing", env=collector.environment)
    trace_id = "c" * 32
    with grpc.insecure_channel(process.address) as channel:
        message = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="r1")
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        list(stub.Score(message, metadata=[("traceparent", f"00-{trace_id}-{'d' * 16}-01")], timeout=120))
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(120) == 0  # what waits to be exported leaves before the end
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"opd.score", "queue", "engine.forward"}
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert spans["opd.score"].parent_span_id.hex() == "d" * 16
    assert spans["engine.forward"].parent_span_id == spans["opd.score"].span_id
    names = {
        a.value.string_value for part in collector.received for a in part.resource.attributes if a.key == "service.name"
    }
    assert names == {"opd-teacher"}


def test_without_a_span_nothing_is_sent_and_garbage_is_ignored() -> None:
    assert trace_metadata() == ()
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert traceparent_of([("x", "y"), ("traceparent", good)]) == good
    assert trace_id_of(good) == "a" * 32
    for bad in ("", "00-zz", good + "x", "\n" + good):
        assert traceparent_of([("traceparent", bad)]) == ""
    assert traceparent_of(None) == trace_id_of("") == ""


def test_tracing_without_the_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from opd.errors import ConfigError

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"opd\[otel\]"):
        Spans.from_environment("opd-teacher", True)


async def test_the_weights_in_the_metrics_are_those_in_use(start: Any, tmp_path: Any) -> None:
    client = await start()
    teachers = client.server.shared.teachers

    def hashes() -> set[str]:
        text = generate_latest(client.server.shared.metrics.registry).decode()
        return set(re.findall(r'opd_teacher_weights_info\{.*weights_hash="(\w+)"\} 1.0', text))

    assert hashes() == {teachers.get("t").info.weights_hash}
    (tmp_path / "seed").write_text("3")
    fresh = await teachers.update_weights("t", tmp_path)
    assert hashes() == {fresh}
    await teachers.unload("t", 0)
    assert hashes() == set()
