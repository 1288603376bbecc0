"""Figures of a run beside another's, or beside what was expected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from run_folders import folder
from run_records import metrics_of
from typer.testing import CliRunner

from opd.errors import ConfigError, RunFolderError
from student.report.compare import against_runs, compare, figures
from student.report.expected import against_expected


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    records: list[dict[str, Any]] = [
        {
            "step": step,
            "tokens_per_second": 1.0 if step <= 2 else 100.0,
            "payload_bytes_per_token": 192.0,
            "response_tokens": 10.0 * step,
            "seconds": {"rollout": 1.0, "learn": 2.0, "evaluate": 50.0},
        }
        for step in range(1, 6)
    ]
    records[1] |= {"eval/accuracy": 0.4, "eval/reverse_kl": 0.3}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ends = {"before": {"accuracy": 0.1, "reverse_kl": 0.9}, "after": {"accuracy": 0.6, "reverse_kl": None}}
    (folder / "summary.json").write_text(json.dumps(ends))
    return folder


def expected(folder: Path, **bands: Any) -> Path:
    path = folder / "expected.json"
    path.write_text(json.dumps({"about": "a test", "expected": bands}))
    return path


def test_figures_are_medians_of_warm_steps_and_evaluations_at_their_steps(run: Path) -> None:
    assert figures(run, []) == {
        "tokens_per_second": 100.0,
        "payload_bytes_per_token": 192.0,
        "seconds/rollout": 1.0,
        "seconds/learn": 2.0,
        "seconds/evaluate": 50.0,
        "step_seconds": 3.0,
        "response_tokens": 150.0,
        "eval/accuracy@0": 0.1,
        "eval/accuracy@2": 0.4,
        "eval/accuracy@5": 0.6,
        "eval/reverse_kl@0": 0.9,
        "eval/reverse_kl@2": 0.3,
        "accuracy_gained": 0.5,
        "reverse_kl_left": pytest.approx(1 / 3),
    }


def test_a_run_that_was_stopped_gains_from_before_its_first_step(run: Path) -> None:
    (run / "summary.json").unlink()
    steps = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.1, "eval/reverse_kl": 0.9}\n' + steps)
    found = figures(run, [])
    assert (found["eval/accuracy@0"], found["accuracy_gained"]) == (0.1, pytest.approx(0.3))
    assert found["reverse_kl_left"] == pytest.approx(1 / 3)
    assert found["tokens_per_second"] == 100.0, "the line before the first step is not one of those that warm up"


def test_a_run_that_is_only_evaluated_has_no_figures_yet(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.1}\n')
    with pytest.raises(RunFolderError, match="has not finished a step"):
        figures(run, [])


def test_a_run_without_evaluations_has_neither_gain_nor_divergence_left(run: Path) -> None:
    (run / "summary.json").unlink()
    lines = metrics_of(run)
    bare = [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    found = figures(run, [])
    assert not {"accuracy_gained", "reverse_kl_left"} & found.keys() and found["response_tokens"] == 150.0


def test_the_verb_exits_with_1_outside_the_band(run: Path, tmp_path: Path) -> None:
    verb = typer.Typer()
    verb.command()(compare)
    good = expected(tmp_path, step_seconds={"high": 4.0, "source": "s"})
    assert CliRunner().invoke(verb, [str(run), str(good)]).exit_code == 0
    bad = expected(tmp_path, step_seconds={"high": 1.0, "source": "s"})
    result = CliRunner().invoke(verb, [str(run), str(bad)])
    assert result.exit_code == 1 and "above" in result.output
    both = CliRunner().invoke(verb, [str(run), str(run)])
    assert both.exit_code == 0 and "ratio 1" in both.output


def test_several_runs_show_what_only_one_has() -> None:
    lines = against_runs({"a": 2.0}, [{"a": 4.0, "b": 1.0}, {"a": 1.0}])
    assert [(line.name, line.value, line.beside) for line in lines] == [
        ("a", 2.0, ("4 (ratio 0.5)", "1 (ratio 2)")),
        ("b", None, ("1", "")),
    ]


def test_three_runs_stand_side_by_side_and_a_file_of_expectations_alone(run: Path, tmp_path: Path) -> None:
    verb = typer.Typer()
    verb.command()(compare)
    result = CliRunner(env={"COLUMNS": "100"}).invoke(verb, [str(run)] * 3)
    assert result.exit_code == 0 and result.output.count("100 (ratio 1)") == 2, "tokens per second"
    good = expected(tmp_path, step_seconds={"high": 4.0, "source": "s"})
    with pytest.raises(ConfigError, match="name it alone"):
        CliRunner().invoke(verb, [str(run), str(run), str(good)], catch_exceptions=False)


def test_a_run_that_was_killed_is_compared_without_its_cut_line(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tokens_per')
    problems: list[str] = []
    assert figures(run, problems)["tokens_per_second"] == 100.0
    assert problems == ["run: metrics.jsonl: 1 damaged line was left out."]


def test_what_is_no_run_and_no_file_of_expectations_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no metrics"):
        figures(tmp_path, [])
    (tmp_path / "other.json").write_text('{"bands": {}}')
    with pytest.raises(ConfigError, match="the key expected"):
        against_expected({}, tmp_path / "other.json")


def test_the_figures_of_a_run_are_written_as_what_is_expected_of_the_next(run: Path, tmp_path: Path) -> None:
    verb = typer.Typer()
    verb.command()(compare)
    (run / "provenance.json").write_text(json.dumps({"packages": {"opd": "9.9", "torch": "2.1", "numpy": "2"}}))
    written = tmp_path / "mine.json"
    first = CliRunner(env={"COLUMNS": "200"}).invoke(verb, [str(run), "--write", str(written), "--band", "0.1"])
    assert first.exit_code == 0 and "14 figures with a band of 10%" in first.output
    entry = json.loads(written.read_text())["expected"]["step_seconds"]
    assert entry == {"value": 3.0, "band": 0.1, "source": "measured by run run, opd 9.9, torch 2.1"}
    assert CliRunner().invoke(verb, [str(run), str(written)]).exit_code == 0
    slower = (run / "metrics.jsonl").read_text().replace('"learn": 2.0', '"learn": 2.4')
    (run / "metrics.jsonl").write_text(slower)
    second = CliRunner(env={"COLUMNS": "200"}).invoke(verb, [str(run), str(written)])
    assert second.exit_code == 1 and second.output.count("above") == 2, "the step and its stage"


def test_a_band_without_a_file_to_write_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--band .*--write FILE"):
        compare(run, band=0.1)


def test_runs_stand_beside_each_other_on_a_page_of_their_own(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", steps=20)
    recipe = (two / "recipe.yaml").read_text().replace("learning_rate: 0.001", "learning_rate: 0.01")
    (two / "recipe.yaml").write_text(recipe.replace("run: runs/first", "run: runs/second"))
    page = tmp_path / "page.html"
    compare(one, [two], html=page)
    text = page.read_text()
    assert not re.search(r"https?://|<script|@import", text) and "{{" not in text
    cell = "<td><bdi>(.*?)</bdi></td>"
    rows = re.findall(rf'<tr><th scope="row"><bdi>([\w.]+)</bdi></th>{cell}{cell}', text)
    assert rows == [("train.learning_rate", "0.001", "0.01")], "what differs in the recipes, the folder aside"
    assert text.index("Accuracy") < text.index("Loss by term") and "<b>&" not in text
    (accuracy,) = re.findall(r"<title>Accuracy</title><desc>(.*?)</desc>", text)
    assert accuracy == "one from 0.2 to 0.8; two from 0.2 to 0.4"
    assert [len(re.findall("<h3>", group)) for group in re.findall(r'"answers">(.*?)</article>', text, re.S)] == [2, 2]


def test_a_page_needs_two_runs_and_a_place(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two run folders"):
        compare(run, html=tmp_path / "page.html")
    with pytest.raises(ConfigError, match="is a folder"):
        compare(run, [run], html=tmp_path)


def test_figures_and_differences_are_printed_as_one_json_object(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder(tmp_path / "other")
    compare(run, [other], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["figures"]["eval/accuracy@10"] for one in found["runs"][1:]] == [0.2]
    assert found["recipes"]["train.steps"] == [None, 40]
    assert any("accuracy was first evaluated at different steps (run 0, other 10)" in one for one in found["problems"])
