"""Golden numbers of the trunk's advantages."""

from typing import Any

import pytest
from credited import credit

from student.data.outcome import Outcome
from student.rl.advantages.chain import AdvantageChain


@pytest.mark.parametrize("entry", [{"name": "group_mean", "scale": "none"}, {"name": "leave_one_out"}])
def test_equal_rewards_that_no_binary_number_holds_give_exactly_nothing(entry: dict[str, Any]) -> None:
    assert credit([0.1] * 3, [0.7] * 6, **entry) == [0.0] * 9


def test_agents_are_normalised_apart() -> None:
    rows = [
        Outcome(0, "p", i, agent=agent, reward=base + i % 2)
        for agent, base in (("solver", 0.0), ("critic", 10.0))
        for i in range(4)
    ]
    found = AdvantageChain({"name": "group_mean", "group": ["uid", "agent"]}, "a test").estimate(rows)
    assert found[:4] == pytest.approx(found[4:])
    together = AdvantageChain({"name": "group_mean", "group": ["uid"]}, "a test").estimate(rows)
    assert max(together[:4]) < 0 < min(together[4:])  # type: ignore[operator]


def test_a_baseline_is_taken_off_every_reward() -> None:
    assert credit([1.0, 0.0, 0.0, 0.0], name="reinforce", baseline=0.25) == [0.75, -0.25, -0.25, -0.25]
