"""The reward of a simulated world's judge."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd_zoo.rewards.trustee import TrusteeReward, TrusteeRewardSettings


def test_an_episode_has_its_last_turns_verdict_and_a_cut_one_less(make_row: Any, services: Any) -> None:
    reward = TrusteeReward(parse_settings(TrusteeRewardSettings, {"name": "trustee", "cut": -0.5}))
    rows = [make_row(value=float(value > 0), sample=i) for i, value in enumerate((1, 0, -1, 1))]
    for row, turns in zip(rows, ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, -1.0), (0.0, 1.0)), strict=True):
        row.turn_rewards = turns
    rows[3].truncated = True
    rows += [make_row(value=0.0, sample=4), make_row(value=None, sample=5)]  # none of its turns was judged, and broken
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [1.0, 0.0, -1.0, -0.5, -0.5, None]
    shares = {name: total / count for name, (total, count) in reward.fired.items()}
    assert shares == pytest.approx({"solved": 1 / 5, "failed": 1 / 5, "cut": 1 / 5})
