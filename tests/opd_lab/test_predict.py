"""What a minute with a student and its teacher predicts."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from opd.errors import ConfigError
from opd_lab.predict import PremiseReport, Window, _preference, measure, verdicts
from opd_lab.predict_cli import premise
from student.settings.recipe import Recipe


def test_the_figures_of_a_student_and_its_teacher(world: Path, serve: Any, tmp_path: Path) -> None:
    server = serve("--model", f"teacher={world / 'teacher'}", "--deterministic")
    recipe = {
        "run": "unused",
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [server.address], "default": "teacher"},
        "prompts": {"task": "addition"},
        "rollout": {"max_new_tokens": 16, "max_prompt_tokens": 64},
        "methods": [{"name": "first_n", "tokens": 3}],
        "train": {"threads": 1},
    }
    report = measure(Recipe.model_validate(recipe), rows=8)
    assert report.rows == 8 and report.length > 1 and report.reverse_kl > 0
    assert 0 <= report.accuracy <= 1, "the answers were not judged"
    assert len(report.by_decile) == len(report.agreement) == 10
    assert all(math.isnan(share) or 0 <= share <= 1 for share in report.agreement)
    lengths = [window.tokens for window in report.windows]
    assert lengths == sorted(lengths) and lengths
    assert all(-1.001 <= window.published <= 1.001 for window in report.windows)

    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    verb = typer.Typer()
    verb.command()(premise)
    options = [str(tmp_path / "recipe.yaml"), "--rows", "8", "--out", str(tmp_path / "premise.json")]
    result = CliRunner().invoke(verb, options, catch_exceptions=False)
    assert result.exit_code == 0 and "distillation" in result.output
    assert json.loads((tmp_path / "premise.json").read_text())["reverse_kl"] == pytest.approx(report.reverse_kl)


def test_too_few_answers_and_no_teachers_are_refused(world: Path) -> None:
    recipe = Recipe.model_validate(
        {"run": "unused", "model": {"path": str(world / "student")}, "prompts": {"task": "addition"}}
    )
    with pytest.raises(ConfigError, match="too few"):
        measure(recipe, rows=4)
    with pytest.raises(ConfigError, match="has no teachers"):
        measure(recipe, rows=8)


def test_figures_that_could_not_be_kept_are_refused_before_they_are_measured(tmp_path: Path) -> None:
    verb = typer.Typer()
    verb.command()(premise)
    for out, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "figures.json", "does not exist; create")):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(verb, [str(tmp_path / "recipe.yaml"), "--out", str(out)], catch_exceptions=False)


def test_a_preference_is_the_share_of_pairs() -> None:
    assert _preference([1.0, 3.0], [2.0, 1.0]) == pytest.approx((0.5 + 1 + 1) / 4)
    assert math.isnan(_preference([1.0], []))


def test_what_follows_is_said_in_a_sentence_each() -> None:
    report = PremiseReport(8, 0.5, 10.0, 0.1, preference=0.8, stop=-0.1)
    good, astray = Window(4, 0.9, 0.8, 1.0), Window(4, 0.9, 0.5, 1.0)
    assert [line.split(":")[0] for line in verdicts(report)] == ["distillation can pay"]
    assert verdicts(replace(report, windows=[good]))[1].startswith("windows can pay")
    assert verdicts(replace(report, windows=[astray]))[1].startswith("windows are unlikely")
    # Of 8 answers: a cosine of 1.99 and one of -6.8 for as many random tokens, whose own is 1.
    lucky = replace(good, cross_fitted=1.99, random=-6.8)
    for drowned in (replace(astray, cross_fitted=math.nan, random=math.nan), replace(astray, random=0.4), lucky):
        assert verdicts(replace(report, windows=[drowned]))[1].startswith("windows: the answers are too few")
    assert verdicts(replace(report, windows=[lucky, astray]))[1].startswith("windows: the answers are too few")
    assert "the first 8 tokens" in verdicts(replace(report, windows=[lucky, replace(good, tokens=8)]))[1]
    assert verdicts(replace(report, preference=0.5))[0].startswith("distillation is unlikely")
    assert "map_stops" in verdicts(replace(report, stop=-25.0))[-1]
