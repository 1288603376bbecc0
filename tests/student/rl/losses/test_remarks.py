"""What is refused and what is said where a policy loss would do nothing."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.plugins import build_plugins
from student.plugin.traits import Traits
from student.rl.advantages.base import GroupEstimator
from student.settings.recipe import Recipe


class Keen(GroupEstimator):
    traits = Traits(learns_from_equal=True)

    def of_group(self, rewards: Any) -> list[float]:
        return list(rewards)


def recipe(objective: dict[str, Any], **train: int) -> Recipe:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4},
        "objective": [objective],
        "train": train,
    }
    return parse_settings(Recipe, data)


@pytest.mark.parametrize(
    ("objective", "train", "said"),
    [
        ({"name": "grpo"}, {}, "clip_low and clip_high of term 'grpo' can never act"),
        ({"name": "grpo", "clip_low": None}, {}, "clip_high of term 'grpo' can never act"),
        ({"name": "grpo"}, {"minibatches": 2}, None),
        ({"name": "grpo"}, {"epochs": 2}, None),
        ({"name": "rloo"}, {}, None),
        ({"name": "policy_gradient"}, {}, None),
        ({"name": "rloo", "clip_low": 0.2}, {}, "clip_low of term 'rloo' can never act, because ratio none"),
        ({"name": "rloo"}, {"minibatches": 2}, "rows of older weights as on policy"),
        ({"name": "rloo", "advantage": {"name": "asym_re"}}, {"epochs": 2}, None),
        ({"name": "rloo", "advantage": {"name": "lpo"}}, {"epochs": 2}, None),
    ],
)
def test_a_clip_that_can_never_act_is_said(objective: dict[str, Any], train: dict[str, int], said: str | None) -> None:
    remarks = build_plugins(recipe(objective, **train)).remarks
    assert len(remarks) == (said is not None)
    assert said is None or said in remarks[0]


def test_dropping_the_groups_that_an_advantage_learns_from_is_refused() -> None:
    name = "tests.student.rl.losses.test_remarks:Keen"
    with pytest.raises(ConfigError, match=r"skip_degenerate.*Keen"):
        build_plugins(recipe({"name": "grpo", "advantage": {"name": name}, "skip_degenerate": True}))
