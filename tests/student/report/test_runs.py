"""`opd runs`: the runs below folders, each with its state and what it has reached."""

import json
from pathlib import Path

import pytest
import typer
from run_folders import folder
from typer.testing import CliRunner, Result

from opd.errors import RunFolderError
from student.report.runs import find_runs, names_of, overview, runs


def called(*arguments: str, columns: int = 80) -> Result:
    verb = typer.Typer()
    verb.command()(runs)
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(verb, arguments, catch_exceptions=False)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A finished run and one that was killed, below a folder."""
    (tmp_path / "sweep").mkdir()
    good, bad = folder(tmp_path / "good", steps=40), folder(tmp_path / "sweep" / "bad", steps=20)
    ends = {"before": {"accuracy": 0.1, "reverse_kl": 0.9}, "after": {"accuracy": 0.9, "reverse_kl": 0.05}}
    (good / "summary.json").write_text(json.dumps({**ends, "seconds": 3700}))
    (good / "ending.json").write_text('{"how": "finished"}')
    (bad / ".lock").touch()
    return tmp_path


def test_runs_at_any_depth_are_listed_with_state_and_result_in_80_columns(two: Path) -> None:
    text = called(str(two)).output
    assert max(map(len, text.splitlines())) <= 80
    (good,) = [line for line in text.splitlines() if "40/40" in line]
    (bad,) = [line for line in text.splitlines() if "20/40" in line]
    assert "finished" in good and "0.1 → 0.9" in good and "0.9 → 0.05" in good and "1 h 1 min" in good
    assert "killed" in bad and "0.2 → 0.4" in bad and "30 s" in bad


def test_runs_as_json_are_an_object_for_each(two: Path) -> None:
    found = [json.loads(line) for line in called(str(two), "--json").output.splitlines()]
    assert {one["run"]: one["state"] for one in found} == {
        str(two / "good"): "finished",
        str(two / "sweep" / "bad"): "killed",
    }


def test_half_written_and_damaged_folders_are_listed_too(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "recipe.yaml").write_text(": [")
    (tmp_path / "one" / "metrics.jsonl").write_text('{"step": 1, "eval/acc')
    (tmp_path / "one" / "summary.json").write_text("[]")
    found = overview(tmp_path / "one")
    assert (found["state"], found["step"], found["accuracy"]) == ("open", "0", "")


def test_what_is_inside_a_run_is_not_a_run(two: Path) -> None:
    inner = two / "good" / "checkpoints" / "step-000001"
    inner.mkdir(parents=True)
    (inner / "recipe.yaml").touch()
    assert list(find_runs(two)) == [two / "good", two / "sweep" / "bad"]


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there are no runs in"):
        called(str(tmp_path))
    with pytest.raises(RunFolderError, match="is not a folder"):
        called(str(tmp_path / "none"))


def test_names_tell_runs_of_one_name_apart() -> None:
    assert names_of([Path("a/x"), Path("b/x")]) == ["a/x", "b/x"] and names_of([Path("a/x"), Path("a/y")]) == ["x", "y"]
