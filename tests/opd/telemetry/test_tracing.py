"""Spans: the tracks of timeline.json, bounded and gone on with after a resume, and the same spans in a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from opd.telemetry import tracing as module
from opd.telemetry.tracing import Spans, Timeline


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_a_resumed_run_adds_to_its_timeline_and_the_oldest_spans_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT", 3)
    path = tmp_path / "timeline.json"
    for run in range(2):
        timeline = Timeline(path)
        for step in range(2):
            timeline.add("sampler", "rollout", 10.0 * run + step, 10.0 * run + step + 0.5, {"step": 2 * run + step})
        timeline.write()
    assert [event["args"]["step"] for event in spans(path)] == [1, 2, 3]
    assert [event["dur"] for event in spans(path)] == [500_000] * 3
    assert spans(path)[2]["ts"] - spans(path)[1]["ts"] == 1_000_000
    names = {e["tid"]: e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "learner", 1: "sampler", 2: "teachers"}


def test_a_damaged_timeline_is_begun_anew_and_one_without_a_folder_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text('{"traceEvents": [{"ph"')
    timeline = Timeline(path)
    timeline.add("learner", "learn", 0.0, 1.0, {"step": 0})
    timeline.write()
    assert [event["name"] for event in spans(path)] == ["learn"]
    for nowhere in (Timeline(None), Timeline(tmp_path / "gone" / "timeline.json")):
        nowhere.add("learner", "learn", 0.0, 1.0, {"step": 0})
        nowhere.write()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["timeline.json"]


def test_what_names_a_track_is_in_the_timeline_and_in_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    timeline = Timeline(tmp_path / "timeline.json")
    both = Spans(provider, timeline)
    with both.span("opd.step", {}), both.span("learn", {"step": 3}, "learner"):
        both.add("scoring", 1.0, 2.0, {"step": 3}, track="teachers")
    timeline.write()
    assert [(event["name"], event["args"]) for event in spans(tmp_path / "timeline.json")] == [
        ("scoring", {"step": 3}),
        ("learn", {"step": 3}),
    ]
    traced = {span.name: span for span in exporter.get_finished_spans()}
    assert traced["scoring"].parent.span_id == traced["learn"].context.span_id
    assert traced["learn"].parent.span_id == traced["opd.step"].context.span_id
    assert traced["scoring"].end_time - traced["scoring"].start_time == 1_000_000_000
