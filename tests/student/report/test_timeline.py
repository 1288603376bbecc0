"""timeline.json: tracks and spans that a trace viewer reads, bounded, and gone on with after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from student.report import timeline as module
from student.report.timeline import Timeline


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
            timeline.add("sampler", "rollout", 10.0 * run + step, 10.0 * run + step + 0.5, step=2 * run + step)
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
    timeline.add("learner", "learn", 0.0, 1.0, step=0)
    timeline.write()
    assert [event["name"] for event in spans(path)] == ["learn"]
    for nowhere in (Timeline(None), Timeline(tmp_path / "gone" / "timeline.json")):
        nowhere.add("learner", "learn", 0.0, 1.0, step=0)
        nowhere.write()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["timeline.json"]
