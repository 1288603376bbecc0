"""Shares of modes: where the student lags, more rows; the same on every rank and after a resume."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.modes import ModeSettings, mode_of
from opd.tasks.prompt import Prompt
from student.data.outcome import Outcome
from student.data.plan import StepPlan, plan_step
from student.data.report import StepReport
from student.job.plugins import build_plugins
from student.methods.curricula.modes import Modes
from student.settings.recipe import Recipe

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


def outcome(mode: str, kl: float, reward: float | None = None, truncated: bool = False, tokens: int = 10) -> Outcome:
    sums = {"behaviour": -1.0, "teacher": -1.0 - tokens * kl}
    return Outcome(0, "u", 0, domain=mode, tokens=tokens, reward=reward, truncated=truncated, sums=sums)


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


def test_a_divergence_is_per_token_of_the_scored_rows_and_smoothed_over_steps() -> None:
    modes = method(methods=[{"name": "modes", "smoothing": 0.75, "floor": 0.25}])
    modes.observe(StepReport(0, {}, [outcome("long", 0.4)]))
    unscored = Outcome(0, "u", 0, domain="long", tokens=1000)
    rows = [outcome("long", 0.2, tokens=30), outcome("long", 0.1, tokens=10), unscored]
    modes.observe(StepReport(1, {}, rows))
    # (30 0.2 + 10 0.1) / 40 = 0.175, so 0.75 0.4 + 0.25 0.175 = 0.34375 are left of 0.4.
    assert modes.lags() == pytest.approx({"long": 0.34375 / 0.4, "short": 1.0})


def test_a_mode_that_began_at_its_teacher_lags_by_what_it_has_lost_since() -> None:
    modes = method()
    modes.observe(StepReport(0, {}, [outcome("long", -0.1), outcome("short", 0.0)]))
    assert modes.lags() == {"long": 0.0, "short": 0.0}
    modes.observe(StepReport(1, {}, [outcome("long", 0.3), outcome("short", 0.2)]))
    assert modes.lags() == pytest.approx({"long": 0.3, "short": 0.2})


def test_the_weight_of_a_mode_multiplies_its_share() -> None:
    weighted = {**MODES, "short": {**MODES["short"], "weight": 3}, "never": {"budget": 4, "prefix": "N", "weight": 0}}
    assert method(modes=weighted).shares() == pytest.approx({"long": 0.25, "short": 0.75})


def test_shares_follow_the_accuracy_that_is_missing_and_a_cut_answer_is_wrong() -> None:
    modes = method(methods=[{"name": "modes", "by": "accuracy", "smoothing": 0.0}])
    assert modes.needs().reward == "verdict" and not method().needs().reward
    start = [
        *(outcome("long", 0, reward) for reward in (0.3, 0.5, None)),
        outcome("short", 0, 1.0, truncated=True),
        outcome("short", 0, None, truncated=True),
    ]
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


def test_a_problem_that_comes_in_two_modes_keeps_distinct_rows_when_both_are_asked_in_one() -> None:
    modes = method(methods=[{"name": "modes", "floor": 1e-9}])
    modes.load_state_dict({"first": {"long": 1.0, "short": 1.0}, "now": {"long": 0.0, "short": 1.0}})
    asked = [ModeSettings(budget=8, prefix=name[0]).mark(Prompt.make("p"), name) for name in ("long", "short", "long2")]
    made = modes.plan(plan_step(3, asked, samples=2, max_new_tokens=8, temperature=1.0))
    assert {mode_of(row.prompt) for row in made.rows} == {"short"}
    assert sorted(row.key.sample for row in made.rows) == list(range(6))


def test_every_share_is_exact_in_expectation_however_few_the_problems() -> None:
    modes = method()
    modes.load_state_dict({"first": {"long": 1.0, "short": 1.0}, "now": {"long": 0.0, "short": 0.5}})
    counts = []
    for step in range(400):
        made = modes.plan(plan_step(step, [Prompt.make("p")], samples=1, max_new_tokens=8, temperature=1.0))
        counts.append(mode_of(made.rows[0].prompt) == "long")
    assert sum(counts) / 400 == pytest.approx(0.25, abs=0.06)  # a deviation of 0.022


def test_no_row_of_a_mode_is_longer_than_the_longest_of_the_recipe() -> None:
    roomy = {name: {**mode, "budget": 99} for name, mode in MODES.items()}
    assert {row.max_new_tokens for row in method(modes=roomy).plan(plan(4)).rows} == {8}
    assert method().plan(StepPlan(0, ())) == StepPlan(0, ())


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
