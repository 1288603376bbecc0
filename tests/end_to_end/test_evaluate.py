"""`opd eval`: figures of a saved model, as the run that saved it measured them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from opd.errors import ConfigError, IncompatibleTeacherError
from opd.tasks import Prompt, Verdict
from student.job.session import train
from student.settings.recipe import Recipe

DEAD = "127.0.0.1:9"


@pytest.fixture
def evaluate(recipe_data: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Call the verb; gives the report that it wrote."""
    import typer

    from student.commands.cli import evaluate as verb

    app = typer.Typer()
    app.command()(verb)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "report.json"
    recipe_data["eval"] = {"prompts": 8}

    def run(model: Path | str, *overrides: str) -> dict[str, Any]:
        recipe.write_text(yaml.safe_dump(recipe_data))
        result = CliRunner().invoke(app, [str(model), *overrides, "--recipe", str(recipe), "--out", str(out)])
        if result.exception is not None:
            raise result.exception

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        report: dict[str, Any] = json.loads(out.read_text(), parse_constant=refuse)
        assert all(f"{name}: " in result.output for name in report)
        assert "samples: [" not in result.output
        return report

    return run


def test_a_saved_student_is_evaluated_as_its_run_did(
    make_recipe: Callable[..., Recipe], evaluate: Callable[..., dict[str, Any]]
) -> None:
    summary = train(make_recipe(train={"steps": 2}))
    report = evaluate(Path(summary["checkpoint"]) / "model")
    for name in ("accuracy", "reverse_kl", "mean_length", "truncated", "tokens"):
        assert report[name] == pytest.approx(summary["after"][name], rel=1e-6), name
    with pytest.raises(ConfigError, match=r"did you mean .*step-000002/model\?"):
        evaluate(summary["checkpoint"])


def test_without_reverse_kl_no_teacher_is_needed(world: Path, evaluate: Callable[..., dict[str, Any]]) -> None:
    report = evaluate(world / "student", f"teachers.endpoints=[{DEAD}]", "eval.reverse_kl=false")
    assert report["reverse_kl"] is None and report["prompts"] == 8


def test_what_samples_and_rewards_training_is_not_asked_of_an_evaluation(
    world: Path, evaluate: Callable[..., dict[str, Any]]
) -> None:
    trained = ["objective=[{name: grpo}]", "rewards=[{name: overlong}]", "rollout.strategy={name: rorecomp}"]
    report = evaluate(world / "student", *trained, "train.max_staleness=2", "eval.reverse_kl=false")
    assert report["prompts"] == 8 and report["accuracy"] is not None


class EvenVerifier:
    """Answers of an even number of characters are correct."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return Verdict.of(len(completion) % 2 == 0)

    def close(self) -> None:
        pass


def test_several_samples_give_pass_at_k_with_intervals_and_every_answer(
    recipe_data: dict[str, Any],
    world: Path,
    evaluate: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "even", SimpleNamespace(EvenVerifier=EvenVerifier))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(60)))
    recipe_data["eval"]["prompts"] = 24
    recipe_data["prompts"] = {"file": str(file), "heldout": 0.5, "verifier": "even:EvenVerifier"}
    report = evaluate(world / "teacher", "eval.samples=4", "eval.temperature=1.0")
    assert list(report["pass_at"]) == ["1", "2", "4"]
    assert report["pass_at"]["1"] == pytest.approx([report["accuracy"], report["accuracy_half_width"]])
    values = [value for value, _ in report["pass_at"].values()]
    assert values == sorted(values) and values[0] < values[-1]
    assert report["reverse_kl_estimator"] == "exact"
    lines = (tmp_path / "report.samples.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 24 * 4
    right = sum(answer["verdict"] == "correct" for answer in answers)
    assert right / len(answers) == pytest.approx(report["accuracy"])
    assert {"prompt", "answer", "verdict", "reward", "kl", "tokens"} <= set(answers[0])


def test_the_divergence_of_a_student_names_its_estimator(evaluate: Callable[..., dict[str, Any]], world: Path) -> None:
    report = evaluate(world / "student", "objective=[{name: opd, payload: gather, k: 8}]")
    assert report["reverse_kl_estimator"] == "exact"  # this teacher serves hidden states
    assert report["pass_at"] == {} and report["repetition"] >= 0


def test_an_accuracy_that_nobody_knows_is_null(
    world: Path, evaluate: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(200)))
    report = evaluate(world / "student", f"prompts={{file: {file}}}", "eval.reverse_kl=false")
    assert report["accuracy"] is None and report["mean_length"] > 0


def test_a_model_with_another_tokenizer_is_named(world: Path, evaluate: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(IncompatibleTeacherError, match=f"student '{world / 'stranger'}'"):
        evaluate(world / "stranger")


def test_a_report_that_could_not_be_written_is_refused_before_the_evaluation(tmp_path: Path) -> None:
    from student.commands.cli import evaluate as verb

    # Neither the model nor the recipe is there: they are not looked at any more.
    with pytest.raises(ConfigError, match=r"--out .*missing/report\.json .*create .*missing"):
        verb("./nothing", tmp_path / "recipe.yaml", out=tmp_path / "missing" / "report.json")
    with pytest.raises(ConfigError, match="is a folder"):
        verb("./nothing", tmp_path / "recipe.yaml", out=tmp_path)
