"""GRPO, RLOO and their parts: golden numbers, enumeration, and what unknown verdicts do (nothing)."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from gradients import gradient, scores, verdicts
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import ConfigError
from student.plugin.terms import build_terms
from student.rl.advantages.base import AdvantageSettings
from student.rl.advantages.group_mean import GroupMean, GroupMeanSettings
from student.rl.advantages.leave_one_out import LeaveOneOut

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def mean_advantage(*rewards: float, **settings: Any) -> list[float]:
    return GroupMean(GroupMeanSettings(name="group_mean", **settings)).of_group(rewards)


def leave_one_out(*rewards: float) -> list[float]:
    return LeaveOneOut(AdvantageSettings(name="leave_one_out")).of_group(rewards)


def test_group_means_of_worked_examples() -> None:
    half = math.sqrt(1 / 3)
    assert mean_advantage(1, 0, 0, 1, epsilon=0.0) == pytest.approx([0.5 / half, -0.5 / half, -0.5 / half, 0.5 / half])
    assert mean_advantage(1, 0, 0, 1, ddof=0, epsilon=0.0) == pytest.approx([1, -1, -1, 1])
    assert mean_advantage(1, 0, 0, 0, scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert mean_advantage(1, 0, ddof=0, epsilon=0.5) == pytest.approx([0.5, -0.5])


def test_leave_one_out_of_a_worked_example() -> None:
    assert leave_one_out(1, 0, 0, 1) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out(0.7) == [0.0]


@given(REWARDS)
def test_advantages_of_a_group_add_up_to_zero(rewards: list[float]) -> None:
    for values in (mean_advantage(*rewards), mean_advantage(*rewards, scale="none"), leave_one_out(*rewards)):
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        assert all(math.isfinite(value) for value in values)


@given(REWARDS)
def test_leave_one_out_is_the_centred_reward_stretched(rewards: list[float]) -> None:
    if len(rewards) > 1:
        stretch = len(rewards) / (len(rewards) - 1)
        expected = [stretch * value for value in mean_advantage(*rewards, scale="none")]
        assert leave_one_out(*rewards) == pytest.approx(expected, abs=1e-9)


@given(st.floats(0, 1), st.integers(1, 6))
def test_groups_that_agree_have_no_advantage(reward: float, count: int) -> None:
    for values in (mean_advantage(*[reward] * count), leave_one_out(*[reward] * count)):
        assert values == pytest.approx([0.0] * count, abs=1e-9)


def test_the_gradient_is_the_advantage_times_the_score(toy: Any) -> None:
    made = toy(masked=False)
    verdicts(made, 1, 0, 0.5, 0)
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])[made.row][:, None]
    actual = gradient(made, name="rloo")
    torch.testing.assert_close(actual, -advantage * scores(made) / (4 * 8), rtol=1e-5, atol=1e-9)


def test_on_policy_all_ratios_have_the_same_gradient_and_nothing_clips(toy: Any) -> None:
    made = toy()
    verdicts(made, 1, 0, 0, 1)
    base = gradient(made, name="policy_gradient", ratio="none", aggregation="sequence_mean")
    torch.testing.assert_close(
        gradient(made, name="policy_gradient", ratio="token", aggregation="sequence_mean"), base, rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(
        gradient(made, name="policy_gradient", ratio="token", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2),
        base,
        rtol=1e-5,
        atol=1e-9,
    )
    torch.testing.assert_close(gradient(made, name="grpo"), base, rtol=1e-5, atol=1e-9)


def test_the_expected_gradient_of_rloo_is_that_of_the_expected_reward(toy: Any) -> None:
    """By enumeration over both one-token responses of a group; r depends on the token."""
    made = toy(lengths=(1, 1), masked=False)
    made.hidden = made.hidden[:1].repeat(2, 1)
    reward = torch.linspace(0, 1, made.vocab, dtype=torch.float64)
    p = made.logp(made.hidden, made.head).exp()[0]
    total = torch.zeros_like(made.hidden)
    for first, second in itertools.product(range(made.vocab), repeat=2):
        made.token_ids = torch.tensor([first, second])
        verdicts(made, float(reward[first]), float(reward[second]))
        total += p[first] * p[second] * gradient(made, name="rloo")
    expected = -(p * (reward - (p * reward).sum())) @ made.head.detach()
    torch.testing.assert_close(total.sum(0), expected * 2 / (2 * 8), rtol=1e-5, atol=1e-9)


def behaviour_with_ratio(made: Any, ratio: list[float]) -> None:
    """Move the sampler so that pi / mu of the positions is `ratio`."""
    logp = made.logp(made.hidden.detach(), made.head.detach()).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - torch.tensor(ratio, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("ratio", "reward", "factor"),
    [
        (1.1, 1.0, 1.1),  # inside: the ratio times the advantage
        (1.5, 1.0, 0.0),  # a good token that is likely enough already
        (1.5, 0.0, 1.5),  # a bad token, become likelier, is still pushed down
        (0.5, 1.0, 0.5),  # a good token, become rarer, is still pushed up
        (0.5, 0.0, 0.0),  # a bad token, rare enough already
    ],
)
def test_clipping_stops_the_gradient_exactly_on_the_far_side(
    toy: Any, ratio: float, reward: float, factor: float
) -> None:
    made = toy(lengths=(1, 1), masked=False)
    verdicts(made, reward, 1.0 - reward)
    behaviour_with_ratio(made, [ratio, 1.0])
    actual = gradient(made, name="grpo", advantage={"name": "group_mean", "scale": "none"})
    advantage = reward - 0.5
    torch.testing.assert_close(actual[0], -factor * advantage * scores(made)[0] / 2, rtol=1e-5, atol=1e-9)


def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens(toy: Any) -> None:
    made = toy(lengths=(3, 1), masked=False)
    verdicts(made, 1, 0)
    behaviour_with_ratio(made, [2.0, 0.5, 1.728, 1.0])
    entry = {"name": "policy_gradient", "ratio": "sequence", "advantage": {"name": "leave_one_out"}}
    # (2 * 0.5 * 1.728) ** (1 / 3) = 1.2. Each token carries a third of every token's ratio, which adds up to 1.2.
    actual = gradient(made, **entry, aggregation="constant")
    torch.testing.assert_close(actual[:3], -1.2 * scores(made)[:3] / (2 * 8), rtol=1e-5, atol=1e-9)


def test_metrics_tell_how_much_is_known_and_clipped(toy: Any) -> None:
    made = toy(lengths=(1, 1, 1, 1), group=4, masked=False)
    verdicts(made, 1, 0, 0, None)
    behaviour_with_ratio(made, [2.0, 1.0, 2.0, 1.0])
    (term,) = build_terms([{"name": "grpo", "advantage": {"name": "leave_one_out"}}])
    term.prepare(made.rows)
    mask = torch.from_numpy(np.array([True, True, True, False]))
    metrics = term.token_losses(dataclasses.replace(made.batch(), mask=mask)).metrics
    assert [float(x) for x in metrics["known_share"]] == [3, 4]
    assert [float(x) for x in metrics["clipped_share"]] == [1, 3]
    assert float(metrics["ratio"][0]) == pytest.approx(5.0)
    assert metrics["advantage_magnitude"] == (pytest.approx(2.0), 3.0)


@pytest.mark.parametrize(
    ("advantage", "word"),
    [({}, "no name"), ({"name": "group_meen"}, "group_mean"), ({"name": "group_mean", "scale": "max"}, "scale")],
)
def test_a_wrong_advantage_is_refused_with_a_reason(advantage: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_terms([{"name": "grpo", "advantage": advantage}])
