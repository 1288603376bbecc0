"""Shares of modes: where the student lags, more rows; the same on every rank and after a resume."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.modes import ModeSettings, mode_of
from opd.tasks.prompt import Prompt
from student.controllers import StepReport
from student.data.outcome import Outcome
from student.data.plan import StepPlan, plan_step
from student.methods.curricula.modes import Modes
from student.plugins import build_plugins
from student.recipe import Recipe

MODES = {
    "long": {"budget": 8, "prefix": "L", "teacher_accuracy": 0.8},
    "short": {"budget": 4, "prefix": "S", "teacher_accuracy": 0.6},
}


def recipe(**changes: Any) -> Recipe:
    data = {
        "run": "run",
        "model": {"path": "student"},
        "teachers": {"endpoints": ["localhost:1"]},
        "prompts": {"task": "addition"},
        "modes": MODES,
        "objective": [{"name": "opd", "payload": "gather", "k": 4}],
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 8},
        "methods": [{"name": "modes", "smoothing": 0.0, "floor": 0.25}],
        "train": {"steps": 1, "learning_rate": 1e-3},
    }
    return parse_settings(Recipe, data | changes)


def method(**changes: Any) -> Modes:
    (found,) = build_plugins(recipe(**changes)).controllers
    assert isinstance(found, Modes)
    return found


def outcome(mode: str, kl: float, reward: float | None = None, truncated: bool = False) -> Outcome:
    sums = {"behaviour": -1.0, "teacher": -1.0 - 10 * kl}
    return Outcome(0, "u", 0, domain=mode, tokens=10, reward=reward, truncated=truncated, sums=sums)


def plan(count: int, samples: int = 2) -> StepPlan:
    prompts = [ModeSettings(budget=8, prefix="L").mark(Prompt.make(f"p{i}"), "long") for i in range(count)]
    return plan_step(3, prompts, samples=samples, max_new_tokens=8, temperature=1.0)


def test_shares_follow_the_divergence_that_is_left() -> None:
    modes = method()
    assert modes.shares() == {"long": 0.5, "short": 0.5}
    modes.observe(StepReport(0, {}, [outcome("long", 0.4), outcome("short", 0.2)]))
    modes.observe(StepReport(1, {}, [outcome("long", 0.1), outcome("short", 0.2)]))
    assert modes.lags() == pytest.approx({"long": 0.25, "short": 1.0})
    assert modes.shares() == pytest.approx({"long": 0.5 / 1.75, "short": 1.25 / 1.75})


def test_shares_follow_the_accuracy_that_is_missing_and_a_cut_answer_is_wrong() -> None:
    modes = method(methods=[{"name": "modes", "by": "accuracy", "smoothing": 0.0}])
    start = [outcome("long", 0, 0.4), outcome("short", 0, 1.0, truncated=True)]
    modes.observe(StepReport(0, {}, start))
    modes.observe(StepReport(1, {}, [outcome("long", 0, 0.7), outcome("short", 0, 0.6)]))
    assert modes.lags() == pytest.approx({"long": 0.25, "short": 0.0})


def test_a_plan_asks_whole_groups_in_modes_by_their_shares() -> None:
    modes = method()
    modes.load_state_dict({"first": {"long": 1.0, "short": 1.0}, "now": {"long": 0.0, "short": 0.5}})
    assert modes.shares() == pytest.approx({"long": 0.25, "short": 0.75})
    made = modes.plan(plan(8))
    asked = [mode_of(row.prompt) for row in made.rows]
    assert asked.count("long") == 4 and asked.count("short") == 12
    assert all(row.max_new_tokens == {"long": 8, "short": 4}[mode_of(row.prompt) or ""] for row in made.rows)
    groups = {row.key.group: row.prompt.uid for row in made.rows}
    assert len(groups) == 8 and all(row.key.uid == row.prompt.uid for row in made.rows)
    assert made == modes.plan(plan(8))  # a step that was interrupted is planned the same


def test_a_problem_that_comes_twice_keeps_distinct_rows() -> None:
    twice = plan(1).rows[0].prompt
    made = method().plan(plan_step(0, [twice] * 6, samples=1, max_new_tokens=8, temperature=1.0))
    assert len({row.key for row in made.rows}) == 6


def test_state_survives_a_resume() -> None:
    modes, other = method(), method()
    modes.observe(StepReport(0, {}, [outcome("long", 0.4), outcome("short", 0.2)]))
    modes.observe(StepReport(1, {}, [outcome("long", 0.3)]))
    other.load_state_dict(modes.state_dict())
    assert other.shares() == modes.shares() != {"long": 0.5, "short": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": {}}, "fewer than two"),
        ({"objective": [{"name": "opd", "payload": "hidden"}]}, "log-probs of sampled tokens"),
        (
            {
                "modes": {
                    name: {k: v for k, v in mode.items() if k != "teacher_accuracy"} for name, mode in MODES.items()
                },
                "methods": [{"name": "modes", "by": "accuracy"}],
            },
            "accuracy of the teacher of mode long, short",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plugins(recipe(**changes))
