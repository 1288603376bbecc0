"""Which recipes may learn before all scores of a step are there: where nothing reads those of a whole step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from opd.config import parse_settings
from student.data.row import Row
from student.job.learns_early import learns_early
from student.job.plugins import build_plugins
from student.methods.distil.opd import OnPolicyDistillation, OpdSettings
from student.plugin.controllers import Controller
from student.plugin.early import reads_no_scores
from student.plugin.strategy import Single
from student.scoring.rewards.base import Reward
from student.settings.recipe import Recipe


class Filtering(Controller):
    """Leaves rows out."""

    def compose(self, rows: list[Row]) -> list[Row]:
        return rows[:1]


class Looking(OnPolicyDistillation):
    """Looks at the rows of an update."""

    def prepare(self, rows: Sequence[Row]) -> None:
        return super().prepare(rows)


class Blind(OnPolicyDistillation):
    """Says that it looks at no scores."""

    @reads_no_scores
    def prepare(self, rows: Sequence[Row]) -> None:
        return super().prepare(rows)


class Choosing(Single):
    """Looks at rows that have been scored."""

    def run(self, plan: Any, sampling: Any) -> list[Row]:
        return super().run(plan, sampling)[:1]


def early(**changes: Any) -> bool:
    data: dict[str, Any] = {
        "run": "run",
        "model": {"path": "m"},
        "teachers": {"endpoints": ["localhost:1"], "default": "t"},
        "prompts": {"task": "addition"},
        **changes,
    }
    recipe = parse_settings(Recipe, data)
    return learns_early(recipe, build_plugins(recipe))


class AdmittingSettings(OpdSettings):
    def admits(self, row: Any) -> bool:
        return super().admits(row)


class Admitting(OnPolicyDistillation[AdmittingSettings]):
    """Looks at rows, or at outcomes, before they are learnt from."""


class Hooked(Controller):
    """Acts on the student's forward, and sees the rows there."""

    def around(self, lm: Any, reading: Any) -> AbstractContextManager[None]:
        return nullcontext()


class Judging(Reward):
    """May read what models say about rows, without having asked for it."""

    def reward(self, rows: Sequence[Row], services: Any) -> None:
        return None


class Counting(Reward):
    """Says that it looks at no scores."""

    @reads_no_scores
    def reward(self, rows: Sequence[Row], services: Any) -> None:
        return None


OWN = f"{__name__}:"
FLIPPED = {"name": "tt_opd", "role": "teacher", "flip_failed": True}
BEST = "{{ prompt }} {% if group.best %}{{ group.best }}{% endif %}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": [{"name": "opd", "payload": "sampled"}, {"name": "vopd"}]},
        {"objective": [{"name": "gopd"}], "teachers": {"endpoints": ["h:1"], "default": "t", "reference": "r"}},
        {"objective": [{"name": "opd", "aggregation": "constant"}], "methods": [{"name": "first_n", "tokens": 3}]},
        {"methods": [{"name": "effopd"}, {"name": "random_tokens", "share": 0.5}]},
        {"objective": [{"name": "poweropd"}]},
        {"train": {"max_staleness": 1}, "objective": [{"name": "opd", "importance_cap": 2}]},
        {"objective": [{"name": OWN + "Blind"}]},
        {"objective": [FLIPPED], "rewards": [{"name": OWN + "Counting"}]},
    ],
)
def test_divergences_on_all_rows_as_they_are_are_learnt_early(changes: dict[str, Any]) -> None:
    assert early(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "objective": [{"name": "opd"}, {"name": "rloo"}],
            "rollout": {"samples_per_prompt": 4},
        },
        {"methods": [{"name": "tcod", "order": "f2b", "every": 1, "turns": 3}]},  # notes the divergence of each turn
        {"methods": [{"name": OWN + "Filtering"}]},
        {"methods": [{"name": OWN + "Hooked"}]},
        {"objective": [{"name": OWN + "Admitting"}]},
        {"objective": [FLIPPED], "rewards": [{"name": OWN + "Judging"}]},
        {"contexts": {"teacher": {"prompt": BEST}}, "rollout": {"samples_per_prompt": 4}},
        {"objective": [{"name": OWN + "Looking"}]},  # what holds of the hook of opd is not known of its own
        {"rollout": {"strategy": {"name": OWN + "Choosing"}}},
        {"train": {"epochs": 2}},  # the second pass begins after an optimizer's step
        {"train": {"minibatches": 2}},
    ],
)
def test_a_recipe_in_which_something_may_read_the_scores_of_a_step_waits_for_all(changes: dict[str, Any]) -> None:
    assert not early(**changes)
