"""What state a run is in, from its folder and the lock that its process holds."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import folder

from opd.files import lock
from student.run.progress import duration, evaluations, seconds_of, status_of
from student.run.reading import read_steps


def how(run: Path, ending: dict[str, Any] | None = None, summary: dict[str, Any] | None = None) -> str:
    return str(status_of(run, read_steps(run, []), summary or {}, ending or {}, 40)["how"])


def test_a_run_goes_while_its_process_holds_the_folder_and_was_killed_if_no_process_does(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", steps=3)
    assert how(run) == "open", "a folder without a lock says nothing"
    with (run / ".lock").open("wb") as file:
        assert lock(run / ".lock", file.fileno())
        assert how(run) == "running"
        for name in ("metrics.jsonl", "samples.jsonl", "recipe.yaml"):
            os.utime(run / name, (time.time() - 3600,) * 2)
        assert how(run) == "stalled", "its process lives, but an hour is long for a step of a second and a half"
    assert how(run) == "killed"


def test_what_a_run_says_of_its_own_end_counts(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", steps=3)
    assert how(run, {"how": "failed", "error": "no"}) == "failed" and how(run, {"how": "stopped"}) == "stopped"
    assert how(run, {"how": "finished"}, {"steps": 3}) == how(run, None, {"steps": 3}) == "finished"


def test_evaluations_are_those_of_the_steps_and_of_a_finished_runs_summary() -> None:
    steps = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1}, {"step": 2, "eval/accuracy": 0.5, "eval/reverse_kl": 0.1}]
    assert evaluations(steps, {}) == [(0, {"accuracy": 0.25}), (2, {"accuracy": 0.5, "reverse_kl": 0.1})]
    after = {"after": {"accuracy": 0.75, "reverse_kl": None}}
    assert evaluations([*steps, {"step": 3}], after)[-1] == (3, {"accuracy": 0.75})
    assert evaluations([], {}) == []


def test_an_unfinished_run_has_taken_the_time_of_its_steps() -> None:
    steps = [{"step": 0}, {"step": 1, "seconds": {"learn": 1.0, "rollout": 2.0}}]
    assert seconds_of(steps, {}) == 3.0 and seconds_of(steps, {"seconds": 9.0}) == 9.0


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (61, "1 min"), (3700, "1 h 1 min"), (90_000, "1 d 1 h"), (0.2, "0 s")]
)
def test_times_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_page_of_a_running_run_has_what_it_has_gained_so_far(tmp_path: Path) -> None:
    from student.report.page.page import write_report

    run = folder(tmp_path / "run", steps=20)
    steps = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "eval/accuracy": 0.1, "eval/reverse_kl": 0.9}) + "\n" + steps
    )
    (run / "provenance.json").write_text('{"started": "2026-11-28 09:00 UTC", "host": "node1", "device": "H100"}')
    with (run / ".lock").open("wb") as file:
        assert lock(run / ".lock", file.fileno())
        text = write_report(run).read_text()
    assert "Running: step 20 of 40" in text and "0.1 → 0.4" in text and "± 0.1 (95 %)" in text
    assert "2026-11-28 09:00 UTC · 30 s · node1 · H100 · page written" in text
