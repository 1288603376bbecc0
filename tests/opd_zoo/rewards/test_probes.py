"""Rewards that read the student's own probabilities, or compare answers, for advantages: golden numbers."""

import math
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.wire.types import Scores
from opd_zoo.rewards.answer_classes import AnswerClasses
from opd_zoo.rewards.infopo import InfoPo, InfoPoSettings
from opd_zoo.rewards.spae import Spae, SpaeSettings, potential
from student.scoring.rewards.base import RewardSettings


def test_a_turn_is_worth_what_its_answer_changes_of_the_next_action(make_row: Any, services: Any) -> None:
    """The ids of the row are 0 to 8; the blank is two tokens, so that contexts tell by their ends what was read."""
    told = {(2,): -1.0, (46, 10): -3.0, (5, 6): -0.5}

    def log_probs(before: list[int], ids: list[int]) -> list[float]:
        (value,) = [value for end, value in told.items() if tuple(before[-len(end) :]) == end]
        return [value - 0.1 * (token == ids[0]) for token in ids]

    services.log_probs = log_probs
    row = make_row(value=1.0, length=9)
    row.turns = ((0, 2), (3, 5), (7, 9))  # the environment wrote 2, then 5 and 6
    reward = InfoPo(parse_settings(InfoPoSettings, {"name": "infopo", "blank": ".\n"}))
    reward.reward([row], services)
    assert row.turn_rewards == pytest.approx((2.0, 2.5, 1.0))
    assert [item.response_ids.tolist() for item in services.read_items] == [[3, 4], [3, 4], [7, 8], [7, 8]]
    assert row.reward is None and reward.fired["gain"] == (pytest.approx(4.5), 2.0)


def test_where_the_environment_said_nothing_nothing_is_gained_and_one_context_cannot_differ(
    make_row: Any, services: Any
) -> None:
    row, unknown = make_row(value=0.0, length=4), make_row(value=None, length=4)
    row.turns = unknown.turns = ((0, 2), (2, 4))
    InfoPo(parse_settings(InfoPoSettings, {"name": "infopo"})).reward([row, unknown], services)
    assert row.turn_rewards == (0.0, 0.0) and unknown.turn_rewards == () and not services.read_items


@pytest.mark.parametrize(
    ("right", "certain", "phi"), [(1.0, 1.0, 1.0), (0.0, 1.0, -1.0), (0.0, 0.0, 0.0), (0.5, 0.5, 0.125)]
)
def test_the_potential_is_one_where_the_student_is_certain_and_right(right: float, certain: float, phi: float) -> None:
    """Two ids of which one is the answer's would tie right to certain, so the entropy is that of other ids."""
    count = 10_000 if certain == 0.0 else round(1 / certain)
    values = np.full((1, count), -math.log(count))
    scores = Scores(sampled=np.log(np.array([max(right, 1e-30)])), values=values, log_tail=np.array([-np.inf]))
    assert potential(scores) == pytest.approx(phi, abs=1e-3)


def test_potentials_are_read_at_the_start_of_each_step(make_row: Any, services: Any) -> None:
    text = "ab|cd|e"
    row = make_row(text, 1.0, length=len(text))
    row.response_ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    beliefs = {0: 0.5, 3: 0.75, 6: 0.9}

    def log_probs(before: list[int], ids: list[int]) -> list[float]:
        assert bytes(ids) == b"42" and bytes(before).endswith(b"=")
        return [math.log(beliefs[len(before) - 3 - 1])] * len(ids)

    services.log_probs = log_probs
    reward = Spae(parse_settings(SpaeSettings, {"name": "spae", "mark": "|", "before": "="}))
    reward.reward([row], services)
    for k, (place, p) in enumerate(beliefs.items()):
        conf = math.exp(p * math.log(p) + (1 - p) * math.log(1 - p))
        assert row.notes[f"spae/start/{k}"] == place
        assert row.notes[f"spae/phi/{k}"] == pytest.approx(1.5 * p * conf + 0.5 * p - conf, abs=1e-5)
    assert reward.fired["steps"] == (3.0, 1.0) and row.reward is None and "spae/phi/3" not in row.notes
    short = Spae(parse_settings(SpaeSettings, {"name": "spae", "mark": "|", "before": "=", "steps": 2}))
    other = make_row(text, 1.0, length=len(text))
    other.response_ids = row.response_ids
    short.reward([other], services)
    assert "spae/phi/1" in other.notes and "spae/phi/2" not in other.notes


def test_answers_that_agree_have_one_class_and_one_that_is_missing_none(make_row: Any, services: Any) -> None:
    rows = [make_row(text, sample=i) for i, text in enumerate(["b", "a", "b", ""])]
    reward = AnswerClasses(parse_settings(RewardSettings, {"name": "answer_classes"}))
    reward.reward(rows, services)
    assert [row.notes.get("answer_class") for row in rows] == [1.0, 0.0, 1.0, None]
    assert reward.fired["distinct"] == (2.0, 4.0)
