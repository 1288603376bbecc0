"""Windows that are a function of the step: what they plan, and which objectives they refuse."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.job.plugins import build_plugins
from student.methods.windows.windows import ScheduleController
from student.settings.recipe import Recipe

CONSTANT = {"name": "opd", "aggregation": "constant"}


def schedule(method: dict[str, Any], objective: dict[str, Any] = CONSTANT, limit: int = 10) -> ScheduleController:
    data = {
        "run": "run",
        "model": {"path": "student"},
        "teachers": {"endpoints": ["localhost:1"]},
        "prompts": {"task": "addition"},
        "objective": [objective],
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": limit},
        "methods": [method],
        "train": {"steps": 8, "learning_rate": 1e-3},
    }
    (found,) = build_plugins(parse_settings(Recipe, data)).controllers
    assert isinstance(found, ScheduleController)
    return found


def lengths(method: ScheduleController, planned: int, steps: int) -> list[int]:
    prompts = [Prompt.make("1+1=")]
    plans = [plan_step(step, prompts, samples=1, max_new_tokens=planned, temperature=1.0) for step in range(steps)]
    return [method.plan(plan).rows[0].max_new_tokens for plan in plans]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"name": "fixed_window", "fraction": 0.31}, [4, 4]),  # 3.1, rounded up
        ({"name": "fixed_window", "fraction": 0.01}, [1, 1]),
        ({"name": "fixed_window", "tokens": 99}, [10, 10]),
        ({"name": "first_n"}, [10, 10]),
        ({"name": "staircase", "first": 1, "rise": 4, "every": 2}, [1, 1, 5, 5, 9, 9, 10, 10]),
        ({"name": "linear_window", "first": 2, "until": 0.5}, [2, 4, 6, 8, 10, 10, 10, 10]),
        ({"name": "linear_window", "first": 2}, [2, 3, 4, 5, 6, 7, 8, 9]),
        ({"name": "linear_window", "first": 2, "until": 0.01}, [2, 10]),  # a ramp of less than a step is over at once
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_window_of_each_step_cuts_what_is_planned(method: dict[str, Any], expected: list[int]) -> None:
    made = schedule(method)
    assert lengths(made, 10, len(expected)) == expected
    metrics = [made.after_update(step, None)["window"] for step in range(len(expected))]  # type: ignore[arg-type]
    assert metrics == expected


def test_a_row_that_is_planned_shorter_stays_as_it_is() -> None:
    assert lengths(schedule({"name": "fixed_window", "tokens": 5}), 3, 1) == [3]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({**CONSTANT, "aggregation": "balanced"}, "needs aggregation constant"),
        ({"name": "dr_grpo"}, "needs the reward of whole responses"),
        ({**CONSTANT, "discount": 0.5}, "set discount: 0"),
        ({"name": "iw_opd", "aggregation": "constant"}, "ranks the tokens of the whole response"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_terms_of_which_a_window_holds_no_part_are_refused(objective: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule({"name": "first_n"}, objective)


@pytest.mark.parametrize("window", [{}, {"tokens": 3, "fraction": 0.5}])
def test_a_fixed_window_is_given_in_one_way(window: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set exactly one"):
        schedule({"name": "fixed_window", **window})
