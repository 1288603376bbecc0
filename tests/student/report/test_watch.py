"""`opd watch`: a run in 80 columns, from whatever its folder holds by now."""

import io
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console

from opd.errors import RunFolderError
from opd.telemetry.metrics_http import serve_metrics
from student.report.watch import BLOCKS, Follower, View, sparkline


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(view.frame())
    return console.file.getvalue()  # type: ignore[attr-defined]


def run_folder(path: Path, recipe: str = "") -> Path:
    path.mkdir()
    (path / "recipe.yaml").write_text("train: {steps: 40}\n" + recipe)
    return path


def test_metrics_that_the_terms_name_come_first(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    (path / "shown.json").write_text('{"KL of opd.1": ["opd.1/jsd"], "mine": ["own/mine", "mine"], "gone": 7}')
    (path / "metrics.jsonl").write_text('{"step": 1, "grad_norm": 1.0, "mine": 2.0, "opd.1/jsd": 0.5}\n')
    text = shown(View(path))
    assert text.index("opd.1/jsd") < text.index("mine") < text.index("grad_norm")


def test_the_first_figure_of_a_course_is_the_one_before_the_first_step(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    lines = ({"step": 0, "eval/accuracy": 0.25}, {"step": 1, "eval/accuracy": 0.5}, {"step": 2, "eval/accuracy": 0.75})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = [line for line in shown(View(path)).splitlines() if line.startswith("eval/accuracy")]
    assert row.split()[-2:] == ["0.25", "0.75"]


def records(path: Path, first: int, last: int) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        for n in range(first, last + 1):
            seconds = {"rollout": 3.0, "learn": 1.0}
            file.write(json.dumps({"step": n, "reverse_kl": 1 / n, "loss/opd": 0.5, "seconds": seconds}) + "\n")


def test_a_run_is_shown_in_80_columns_as_it_grows(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a-run")
    view = View(path)
    assert "step 0/40" in shown(view)
    records(path, 1, 10)
    sample = {"step": 10, "label": "train", "prompt": "1+1=" + "x" * 200, "answer": "[b]2", "verdict": "correct"}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    text = shown(view)
    assert "step 10/40" in text and "4.0 s a step, 2 min left" in text and "correct" in text and "[b]2" in text
    assert "rollout" in text and "3.000" in text and "loss/opd" in text
    assert max(map(len, text.splitlines())) <= 80
    (path / "ending.json").write_text('{"how": "finished"}')
    assert view.ended == "finished" and "finished" in shown(view)


def test_teachers_are_read_from_the_runs_metrics(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Gauge("opd_student_fleet_replicas", "n", ["teacher", "state"], registry=registry).labels("math", "healthy").set(3)
    Gauge("opd_student_fleet_queued_tokens", "n", ["teacher"], registry=registry).labels("math").set(12345)
    server, thread = serve_metrics(registry, 0)
    try:
        text = shown(View(run_folder(tmp_path / "run", f"metrics_port: {server.server_port}\n")))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
    assert "math" in text and "3 healthy" in text and "12,345" in text and "away for" not in text
    text = shown(View(run_folder(tmp_path / "gone", f"metrics_port: {server.server_port}\n")))
    assert "does not answer" in text


def test_an_outage_stands_on_top_and_no_time_is_left_then(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    replicas = Gauge("opd_student_fleet_replicas", "n", ["teacher", "state"], registry=registry)
    replicas.labels("math", "healthy").set(0)
    replicas.labels("math", "dead").set(2)
    Gauge("opd_student_fleet_down_seconds", "n", ["teacher"], registry=registry).labels("math").set(95)
    server, thread = serve_metrics(registry, 0)
    try:
        path = run_folder(tmp_path / "run", f"metrics_port: {server.server_port}\n")
        records(path, 1, 10)
        text = shown(View(path))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
    head, alarm = text.splitlines()[:2]
    assert "step 10/40" in head and "left" not in head
    assert alarm == "teacher math has been away for 1 min: 2 dead"


def test_a_run_that_was_killed_is_not_shown_as_one_that_goes(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    records(path, 1, 10)
    assert not View(path).over, "a folder without a lock says nothing"
    (path / ".lock").touch()
    assert View(path).over
    head = shown(View(path)).splitlines()[0]
    assert "killed" in head and "left" not in head


def test_a_line_that_is_being_written_waits_and_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text('{"step": 1}\nbroken\n{"step": 2')
    assert [r["step"] for r in follower.read()] == [1]
    with path.open("a") as file:
        file.write("}\n")
    assert [r["step"] for r in follower.read()] == [1, 2]
    path.write_text('{"step": 1}\n')
    assert [r["step"] for r in follower.read()] == [1]


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline(list(range(8))) == BLOCKS
    assert len(sparkline(list(range(1000)), 36)) <= 36 and sparkline([1.0, 1.0]) == BLOCKS[3] * 2


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        View(tmp_path)
