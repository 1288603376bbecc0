"""TRUSTEE's curriculum: difficulty moves only outside its band, stays in its range, and is saved."""

from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import parse_settings
from opd_zoo.curricula.trustee import Trustee, TrusteeSettings


def curriculum(**settings: Any) -> Trustee:
    return Trustee(parse_settings(TrusteeSettings, {"name": "trustee", **settings}))


def see(method: Trustee, *rewards: float | None) -> float:
    outcomes = [SimpleNamespace(tags={"difficulty": "1"}, reward=reward) for reward in rewards]
    method.observe(SimpleNamespace(outcomes=outcomes))  # type: ignore[arg-type]
    return method.difficulty


def test_difficulty_rises_above_a_half_falls_below_nothing_and_stays_between() -> None:
    method = curriculum(first=50)
    assert [see(method, r) for r in (0.5, 0.0, 1.0, 0.6, -0.1)] == [50, 50, 53, 56, 53]


def test_what_moves_it_is_the_mean_over_episodes_and_over_steps() -> None:
    assert see(curriculum(first=50), 0.4, 0.4) == 50
    method = curriculum(first=50, batches=2)
    assert [see(method, reward) for reward in (0.4, 0.2)] == [50, 50]


def test_episodes_without_a_reward_are_not_in_the_mean() -> None:
    method = curriculum(first=50)
    assert see(method, 1.0, 1.0, None, None, None) == 53
    assert see(method, None, None) == 53 and see(method) == 53


@pytest.mark.parametrize(("first", "reward", "end"), [(99, 1.0, 100), (2, -1.0, 1)])
def test_it_stays_from_1_to_100(first: int, reward: float, end: int) -> None:
    method = curriculum(first=first)
    assert [see(method, reward) for _ in range(3)] == [end] * 3


def test_a_mean_over_several_steps_is_saved_and_starts_anew_when_it_has_moved() -> None:
    method = curriculum(first=10, batches=2)
    assert see(method, 1.0) == 10
    resumed = curriculum(first=10, batches=2)
    resumed.load_state_dict(method.state_dict())
    assert see(resumed, 1.0) == see(method, 1.0) == 13
    assert resumed.state_dict() == {"difficulty": 13.0, "history": []}
