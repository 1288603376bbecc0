"""Trackers get what metrics.jsonl gets, and none of them can stop a run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.tracking import TensorBoardTracker
from waiting import wait_until

from student.report.trackers import Trackers
from student.settings.trackers import TrackerSettings

SAMPLE = {"step": 1, "label": "train", "prompt": "1+1=", "answer": "2", "verdict": "correct", "reward": 1.0, "kl": 0.5}
RECIPE = {"run": "runs/x", "train": {"steps": 3}, "objective": [{"name": "opd"}]}
Make = Callable[..., tuple[Trackers, list[str]]]


@pytest.fixture
def track(tmp_path: Path) -> Make:
    PartialState(cpu=True)

    def make(name: str, **options: Any) -> tuple[Trackers, list[str]]:
        pytest.importorskip(name, reason="the extra trackers is not installed; `make trackers` gets it")
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "report.html").write_text("<p>report</p>")
        said: list[str] = []
        return Trackers([TrackerSettings(name=name, options=options)], folder, RECIPE, said.append), said

    return make


def go(made: Trackers, tmp_path: Path) -> None:
    for step in (1, 2):
        made.step(step, {"reverse_kl": 1 / step, "loss/opd": 0.25}, {"learn": 0.1})
    made.samples([SAMPLE])
    made.close(tmp_path / "run" / "report.html")


def test_tensorboard_holds_metrics_times_and_answers(track: Make, tmp_path: Path) -> None:
    made, said = track("tensorboard")
    go(made, tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "opd")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reverse_kl")] == [(1, 1.0), (2, 0.5)]
    assert events.Scalars("seconds/learn")[0].value == pytest.approx(0.1)
    (text,) = events.Tensors("samples/train/text_summary")
    assert b"1+1=" in text.tensor_proto.string_val[0] and not said


def test_trackio_holds_metrics(track: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    # In a process of its own: the folder is read when trackio is imported.
    code = f"""
from pathlib import Path
from accelerate import PartialState
from student.report.trackers import Trackers
from student.settings.trackers import TrackerSettings
PartialState(cpu=True)
folder = Path({str(tmp_path)!r}) / "run"; folder.mkdir()
made = Trackers([TrackerSettings(name="trackio")], folder, {RECIPE!r}, print)
for step in (1, 2):
    made.step(step, {{"reverse_kl": 1 / step}}, {{"learn": 0.1}})
made.samples([{SAMPLE!r}]); made.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0 and "is left out" not in done.stdout, done.stdout + done.stderr
    import sqlite3

    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as held:
        rows = [(step, json.loads(values)) for step, values in held.execute("select step, metrics from metrics")]
    assert {step: v["reverse_kl"] for step, v in rows if "reverse_kl" in v} == {1: 1.0, 2: 0.5}


def test_wandb_holds_a_run_offline(track: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    made, said = track("wandb", mode="offline")
    go(made, tmp_path)
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    wait_until(lambda: b"reverse_kl" in record.read_bytes())  # a process of wandb's own writes it, and may be behind
    assert not said
    assert (run / "files" / "report.html").exists()


def test_mlflow_holds_metrics_and_the_report(track: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made, said = track("mlflow")
    go(made, tmp_path)
    assert not said
    (metric,) = (tmp_path / "mlruns").rglob("metrics/reverse_kl")
    assert [line.split()[1:] for line in metric.read_text().splitlines()] == [["1.0", "1"], ["0.5", "2"]]
    assert list((tmp_path / "mlruns").rglob("report.html")) and list((tmp_path / "mlruns").rglob("samples-*.json"))


def test_a_tracker_that_fails_is_left_out_and_said_once(
    track: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = track("tensorboard")

    def lost(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("the tracker is\naway")

    monkeypatch.setattr(TensorBoardTracker, "log", lost)
    go(made, tmp_path)
    assert said == ["tracker tensorboard failed and is not used from now on: ConnectionError: the tracker is away"]
    assert made.failures == 1


def test_a_tracker_that_cannot_start_costs_the_run_nothing(
    track: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = track("tensorboard", nonsense=1)
    go(made, tmp_path)
    assert made.failures == 1 and "nonsense" in said[0]
