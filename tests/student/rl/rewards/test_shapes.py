"""What a reward of one's own may not give, and which rows a chain of rewards counts.

What is refused is named, and neither the advantage nor the loss is blamed.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import ConfigError, DataError, PluginError
from student.data.outcome import reward_of
from student.data.row import Row
from student.scoring.rewards.base import Reward, RewardServices
from student.scoring.rewards.chain import RewardChain

GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "too few turns": ({"turn_rewards": (1.0, 2.0)}, "2 rewards for 1 turns; it must set one for each"),
    "too few tokens": ({"token_rewards": np.ones(3, np.float32)}, r"of shape \(3,\) for a response of 4 tokens"),
    "a turn that is NaN": (
        {"turn_rewards": (float("nan"),)},
        "not finite for a turn of sample 0 of prompt .*; it must be 0",
    ),
    "a text": ({"reward": "good"}, "the reward .* to 'good'"),
    "no number as a part": ({"reward_parts": {"mine": None}}, "the part of the reward .* to None"),
    "a tensor as a part": ({"reward_parts": {"mine": torch.ones(1)}}, "the part of the reward .* to tensor"),
    "a list by token": ({"token_rewards": [0.0, 1.0, 0.0, 0.0]}, "token_rewards to .*; it must be a numpy array"),
    "a reward of NaN": ({"reward": float("nan")}, "the reward .* to nan; it must be a finite number"),
    "an infinite token": ({"token_rewards": np.array([0, np.inf, 0, 0], np.float32)}, "not finite for a token of"),
}


class Given(Reward):
    """Gives every row what the test says."""

    kind = "part"

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(SimpleNamespace(name="mine"))  # type: ignore[arg-type]
        self.values = values

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        for row in rows:
            for name, value in self.values.items():
                setattr(row, name, value)


@pytest.mark.parametrize("case", GIVEN)
def test_rewards_that_are_none_are_refused_and_their_plug_in_named(case: str, make_row: Any, services: Any) -> None:
    values, words = GIVEN[case]
    with pytest.raises(PluginError, match=f"reward 'mine' set .*{words}"):
        RewardChain([Given(values)]).apply([make_row("a", 1.0)], services)


def test_a_reward_that_is_not_a_number_is_refused(make_row: Any) -> None:
    row = make_row("a", 1.0)
    row.reward = float("nan")
    with pytest.raises(DataError, match=r"is nan; .*finite"):
        reward_of(row)


def test_a_reward_that_returns_what_it_should_set_is_refused(make_row: Any, services: Any) -> None:
    class Returning(Given):
        def reward(self, rows: Sequence[Row], services: RewardServices) -> Any:
            return [1.0 for _ in rows]

    with pytest.raises(PluginError, match=r"reward 'mine' returned \[1\.0\]; .*row\.reward"):
        RewardChain([Returning({})]).apply([make_row("a", 1.0)], services)


def test_a_reward_of_a_kind_that_there_is_not_is_refused() -> None:
    class Total(Given):
        kind = "total"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"reward mine .*kind 'total'; .*'whole' or 'part'"):
        RewardChain([Total({})])


def test_rows_that_are_not_of_the_step_are_rewarded_and_not_counted(make_row: Any, services: Any) -> None:
    class Counting(Given):
        def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
            super().reward(rows, services)
            self.fire("bites", 1.0, len(rows))

    chain, probed = RewardChain([Counting({"reward": 0.5})]), make_row("a", 1.0)
    chain.apply([make_row("b", 1.0)], services)
    chain.aside().apply([probed], services)
    assert probed.reward == 0.5 and chain.counted() == [{"bites": (1.0, 1.0)}]
