"""Golden numbers of the penalty for long answers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.data.outcome import reward_of
from student.data.row import Row
from student.rl import REWARDS

Make = Callable[..., Row]


def build(name: str, **settings: Any) -> Any:
    cls = REWARDS.load(name)
    return cls(parse_settings(cls.settings_type, {"name": name, **settings}))


def recipe(samples: int = 8, longest: int = 100) -> Any:
    return SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=longest, samples_per_prompt=samples))


def test_overlong_grows_over_the_buffer(make_row: Make, services: Any) -> None:
    reward = build("overlong", buffer=20)
    reward.check(recipe(), [])
    rows = [make_row(value=1.0, length=n) for n in (80, 85, 90, 100, 110)]
    reward.reward(rows, services)
    assert [row.reward_parts["overlong"] for row in rows] == pytest.approx([0.0, -0.25, -0.5, -1.0, -1.0])
    assert [reward_of(row) for row in rows] == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])
    assert reward.fired["bites"] == (4.0, 5.0)


@pytest.mark.parametrize(
    ("settings", "words"), [({"buffer": 200}, "more than the limit"), ({"buffer": 1, "limit": 200}, "have at most 100")]
)
def test_an_overlong_penalty_that_cannot_act_is_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build("overlong", **settings).check(recipe(), [])
