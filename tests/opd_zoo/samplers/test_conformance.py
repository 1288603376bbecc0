"""What every registered sampler owes: tests that a new one inherits by being registered."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_state import save_state

from opd.config import parse_settings
from opd_zoo.samplers.base import SignalController
from student.data.plan import StepPlan
from student.data.row import Row
from student.plugin.controllers import CONTROLLERS
from student.state.state_io import load_state

NAMES = [
    entry.name
    for entry in CONTROLLERS
    if entry.path.startswith("opd_zoo.samplers.") or issubclass(CONTROLLERS.load(entry.name), SignalController)
]
SETTINGS: dict[str, dict[str, Any]] = {
    "drive": {"phases": [{"step": 3, "keep": 0.4, "samples": 6}, {"step": 6, "keep": 0.5}]},
    "stages": {"stages": [{"step": 0, "domains": ["easy"]}, {"step": 4, "domains": ["hard"], "max_new_tokens": 5}]},
    "prompt_augmentation": {"templates": [{"text": "{prompt}", "format": "0"}, {"text": "Q: {prompt}", "format": "1"}]},
}
STEPS = 14


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, run: Any) -> Callable[..., Any]:
    return lambda **more: run(request.param, **{**SETTINGS.get(request.param, {}), **more})


def numbers(rows: list[Row]) -> list[Any]:
    return [(row.key, row.weight, sorted(row.notes.items()), sorted(row.reward_parts.items())) for row in rows]


def test_it_plans_whole_groups_of_distinct_rows(make: Callable[..., Any]) -> None:
    made = make()
    for _ in range(STEPS):
        plan: StepPlan = made.plan()
        keys = [row.key for row in plan.rows]
        assert len(set(keys)) == len(keys) > 0
        assert len({row.key.group for row in plan.rows}) <= 6
        assert all(row.key.step == made.step for row in plan.rows)
        assert all(row.max_new_tokens <= 8 for row in plan.rows)
        made.finish(plan)


def test_a_step_that_is_taken_again_is_planned_alike(make: Callable[..., Any]) -> None:
    made = make()
    made.go(4)
    before, first = made.method.state_dict(), made.plan()
    once = numbers(made.method.compose(made.rows(first)))
    assert made.plan() == first and made.plan() == first
    assert numbers(made.method.compose(made.rows(first))) == once
    made.method.load_state_dict(before)
    assert made.plan() == first


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(make: Callable[..., Any], tmp_path: Path) -> None:
    one, other = make(), make()
    one.go(5)
    save_state(tmp_path, "method", one.method.state_dict())
    other.method.load_state_dict(load_state(tmp_path, "method"))
    other.position, other.step = one.position, one.step
    for _ in range(2):
        plan = one.plan()
        assert other.plan() == plan
        assert one.finish(plan) == other.finish(plan)


def test_two_ranks_compose_what_one_does(make: Callable[..., Any]) -> None:
    made = make()
    made.go(5)
    plan = made.plan()
    whole = numbers(made.method.compose(made.rows(plan)))
    parts = [numbers(made.method.compose(made.rows(plan.shard(rank, 2)))) for rank in range(2)]
    assert sorted(parts[0] + parts[1], key=str) == sorted(whole, key=str)


def test_it_shows_that_it_acted(make: Callable[..., Any]) -> None:
    found = make().go(STEPS)
    assert all(metrics and all(map(math.isfinite, metrics.values())) for metrics in found)
    acted = ("replaced", "moved", "templates", "gain")
    assert any(value for name, value in found[-1].items() if name.rpartition("/")[2] in acted)


def test_it_learns_from_a_divergence_as_from_rewards(make: Callable[..., Any]) -> None:
    if not isinstance(make().method, SignalController):
        pytest.skip("it learns from nothing")
    rewarded, distilled = make(), make(signal="divergence", scale=0.2)
    assert distilled.method.needs().teacher and not rewarded.method.needs().teacher
    assert rewarded.method.needs().reward and not distilled.method.needs().reward
    distilled.go(4)
    assert distilled.method.state_dict().keys() == rewarded.method.state_dict().keys()
    assert any("informative_share" in name for name in distilled.go(1)[0])


def test_settings_survive_a_round_trip(make: Callable[..., Any]) -> None:
    settings = make().method.settings
    assert parse_settings(type(settings), settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("name", NAMES)
def test_its_documentation_has_a_formula_a_source_and_a_grade(name: str) -> None:
    cls = CONTROLLERS.load(name)
    text = sys.modules[cls.__module__].__doc__ or ""
    assert "\n    " in text and ("Source" in text or "arXiv" in text)
    assert cls.evidence in {"text and code", "text", "abstract", "inferred", "own"}
