"""Rewards by token, and spans of an answer that a judge quotes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.wire.types import PayloadKind, Scores
from opd_zoo.text_spans import ends_of, tokens_of
from student.data.needs import REFERENCE, TEACHER
from student.data.outcome import reward_of
from student.data.row import Row
from student.rl import REWARDS
from student.rl.advantages.gae import credit_of

Make = Callable[..., Row]


def build(name: str, **settings: Any) -> Any:
    cls = REWARDS.load(name)
    return cls(parse_settings(cls.settings_type, {"name": name, **settings}))


@pytest.fixture
def row(make_row: Make) -> Row:
    made = make_row("abcd", 1.0)
    made.response_ids = np.frombuffer(b"abcd", np.uint8).astype(np.uint32)
    made.behaviour_logp = np.array([-1.0, -2.0, -1.0, -1.0], np.float32)
    made.loss_mask = np.array([True, True, False, True])
    for role, values in ((REFERENCE, [-2.0, -1.0, 0.0, -1.0]), (TEACHER, [-1.0, -3.0, -9.0, -1.1])):
        made.signals[role, PayloadKind.SAMPLED] = Scores(sampled=np.array(values, np.float32))
    return made


def test_the_kl_in_the_reward_adds_up_to_that_of_the_answer(row: Row, services: Any) -> None:
    build("kl_penalty", beta=0.1).reward([row], services)
    assert row.token_rewards.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert reward_of(row) == 1.0  # the whole stays the verdict's
    credit = credit_of(row, 1.0, 1.0, 1.0)
    assert credit.tolist() == pytest.approx([1.0, 1.1, 0.0, 1.0])


def test_a_dpo_models_tokens_add_up_to_its_reward_where_no_bound_acts(row: Row, services: Any) -> None:
    free, bounded = build("rto", bound=9.0), build("rto")
    free.reward([row], services)
    assert row.token_rewards.tolist() == pytest.approx([0.05, -0.1, 0.0, -0.005])
    assert row.token_rewards.sum() == pytest.approx(0.05 * (1.0 - 2.0 - 0.1))
    row.token_rewards = None
    bounded.reward([row], services)
    assert row.token_rewards.tolist() == pytest.approx([0.05, -0.05, 0.0, -0.005])
    assert bounded.fired["clipped"] == (1.0, 3.0) and free.fired["clipped"] == (0.0, 3.0)
    bounded.reward([row], services)
    assert row.token_rewards.sum() == pytest.approx(-0.01)  # they add to what others gave


def test_what_a_judge_quotes_is_rewarded_by_token(row: Row, services: Any) -> None:
    reward = build("text2grad", endpoint="http://nowhere.invalid", model="m")
    said = iter(['Sure: {"good": ["ab"], "bad": ["d", "elsewhere"]}', "no idea"])
    reward.client = SimpleNamespace(ask=lambda messages: next(said))
    reward.settings = reward.settings.model_copy(update={"workers": 1})
    silent = Row(**{name: getattr(row, name) for name in Row.__dataclass_fields__})
    for one in (row, silent):
        one.rewarded = True
    reward.reward([row, silent], services)
    assert row.token_rewards.tolist() == [1.0, 1.0, 0.0, -1.0] and reward_of(row) == 0.0
    assert silent.token_rewards is None and reward_of(silent) is None
    assert reward.fired == {"unknown": (1.0, 2.0), "unmatched": (1.0, 3.0)}


def test_quotes_are_weighed_summed_and_added_to_what_others_gave(row: Row, services: Any) -> None:
    reward = build("text2grad", endpoint="http://nowhere.invalid", model="m", weight=0.5, adds=True)
    reward.client = SimpleNamespace(ask=lambda messages: '{"good": ["ab", "b"], "bad": ["cd"]}')
    row.token_rewards = np.array([0.25, 0.0, 0.0, 0.0], np.float32)
    reward.reward([row], services)
    assert row.token_rewards.tolist() == [0.75, 1.0, 0.0, -0.5]  # the third is masked
    assert reward_of(row) == 1.0  # the verdict stays


@pytest.mark.parametrize("said", ['{"good": "ab"}', '{"bad": 3}', '["ab"]', "{", '{"good": ' + "[" * 99_999 + "}"])
def test_a_judge_that_quotes_in_another_form_says_nothing(row: Row, services: Any, said: str) -> None:
    reward = build("text2grad", endpoint="http://nowhere.invalid", model="m")
    reward.client = SimpleNamespace(ask=lambda messages: said)
    row.rewarded = True
    reward.reward([row], services)
    assert row.token_rewards is None and reward_of(row) is None and reward.fired == {"unknown": (1.0, 1.0)}


@pytest.mark.parametrize("name", ["kl_penalty", "rto"])
def test_they_state_that_they_give_rewards_by_token(name: str) -> None:
    assert build(name).traits.gives == ("token_rewards",), "by which a recipe without a reader of these is refused"


def test_spans_meet_tokens_that_they_only_touch() -> None:
    pieces = ["The ans", "wer is", " 4", "2.\n", "\nDone"]
    assert tokens_of(pieces, "answer") == range(0, 2) and tokens_of(pieces, "42") == range(2, 4)
    assert not tokens_of(pieces, "43") and not tokens_of(pieces, "")
    assert ends_of(pieces, "\n\n") == [5] and ends_of(pieces, "e") == [1, 2, 5] and ends_of(pieces, "x") == []


def test_tulu_pays_ten_for_what_is_right_and_ends(make_row: Make, services: Any) -> None:
    rows = [make_row(value=value, truncated=cut) for value in (1.0, 0.5, None) for cut in (False, True)]
    reward = build("tulu3")
    for one in rows:
        one.rewarded = True
    reward.reward(rows, services)
    assert [reward_of(one) for one in rows] == [10.0, -10.0, 0.0, -10.0, None, -10.0]
    assert reward.fired["cut_share"] == (3.0, 6.0)
