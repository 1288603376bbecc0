"""A run ends after a number of response tokens, of its own or another run's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import metrics_of

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd_zoo.distil.token_budget import TokenBudgetSettings
from student.job.plugins import build_plugins
from student.job.session import train
from student.settings.recipe import Recipe


@pytest.fixture
def recipe(world: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """SFT on worked solutions of 11 or 12 tokens, without a teacher; `budget` is the method's settings."""

    def make(name: str, *, steps: int, budget: dict[str, Any] | None, **more: Any) -> Recipe:
        methods: list[dict[str, Any]] = [{"name": "expert_rows", "share": 1.0}]
        methods += [] if budget is None else [{"name": "token_budget", **budget}]
        data = {
            "run": str(tmp_path / name),
            "model": {"path": str(world / "student")},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {"prompts_per_step": 4, "max_new_tokens": 16, "max_prompt_tokens": 16},
            "objective": [{"name": "sft"}],
            "methods": methods,
            "train": {"steps": steps, "threads": 1, **more},
            "eval": {"prompts": 0},
        }
        return parse_settings(Recipe, data)

    return make


def tokens(run: Path) -> list[float]:
    return [line["response_tokens"] for line in metrics_of(run)]


def test_the_run_ends_with_the_first_step_that_reaches_the_budget(recipe: Callable[..., Recipe]) -> None:
    summary = train(recipe("budget", steps=50, budget={"tokens": 120}))
    found = tokens(Path(summary["run"]))
    assert sum(found[:-1]) < 120 <= sum(found) == summary["response_tokens"]
    assert 1 < summary["steps"] == len(found) < 50


def test_another_run_s_tokens_are_the_budget(recipe: Callable[..., Recipe]) -> None:
    first = train(recipe("first", steps=3, budget=None))
    second = train(recipe("second", steps=50, budget={"run": first["run"]}))
    assert second["steps"] == 3 and second["response_tokens"] == first["response_tokens"]


def test_a_resumed_run_counts_on(recipe: Callable[..., Recipe]) -> None:
    calm = train(recipe("calm", steps=50, budget={"tokens": 120}))
    train(recipe("cut", steps=2, budget={"tokens": 120}))
    resumed = train(recipe("cut", steps=50, budget={"tokens": 120}), resume=True)
    assert 2 < resumed["steps"] == calm["steps"]
    assert tokens(Path(resumed["run"])) == tokens(Path(calm["run"]))


def test_a_run_that_has_not_ended_is_refused_before_the_first_step(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"no response_tokens.* wait"):
        train(recipe("second", steps=2, budget={"run": str(tmp_path / "nowhere")}))
    assert not (tmp_path / "second").exists()


def test_a_budget_is_of_one_kind_and_a_falling_schedule_is_remarked(recipe: Callable[..., Recipe]) -> None:
    for wrong in ({}, {"tokens": 5, "run": "x"}):
        with pytest.raises(ConfigError, match="either tokens or run"):
            parse_settings(TokenBudgetSettings, {"name": "token_budget", **wrong})
    falling = recipe("x", steps=9, budget={"tokens": 5}, schedule="cosine")
    said = [line for controller in build_plugins(falling).controllers for line in controller.remarks(falling, [])]
    assert any("schedule cosine decays over all 9 steps" in line for line in said)
