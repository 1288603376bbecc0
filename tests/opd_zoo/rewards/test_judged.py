"""Rewards that ask a judge about pairs, criteria, reasoning and turns: golden numbers, and what unclear words do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks.chat import ChatFailed
from opd.tasks.prompt import Prompt
from opd_zoo.criteria import criteria_of
from student.data.outcome import reward_of
from student.data.row import Row
from student.rl import REWARDS

Make = Callable[..., Row]


def build(name: str, says: Callable[[str], str], **settings: Any) -> Any:
    """A reward whose judge answers by what it is asked."""
    cls = REWARDS.load(name)
    made = cls(parse_settings(cls.settings_type, {"name": name, "endpoint": "http://x/v1", "model": "m", **settings}))
    made.client.ask = lambda messages: says(messages[0]["content"])
    return made


def beats(question: str) -> str:
    """Rock, paper and scissors, by the first letters of two answers."""
    first, second = (question.split(mark)[1].strip()[0] for mark in ("Answer 1:", "Answer 2:"))
    if first == second:
        return "They are equal: tie"
    return "Answer 1" if (first, second) in (("p", "r"), ("r", "s"), ("s", "p")) else "It is 2."


def test_an_answer_is_worth_the_share_of_the_others_that_it_beats(make_row: Make, services: Any) -> None:
    rows = [make_row(text, sample=i) for i, text in enumerate(["rock", "paper", "scissors"])]
    other = Prompt.make("other")
    rows += [make_row(text, sample=i, prompt=other) for i, text in enumerate(["paper", "rock", "rock!", "paper"])]
    reward = build("spo", beats)
    reward.reward(rows, services)
    assert [row.reward for row in rows[:3]] == [0.5, 0.5, 0.5]  # preferences that go round in a circle
    assert [row.reward for row in rows[3:]] == pytest.approx([2.5 / 3, 0.5 / 3, 0.5 / 3, 2.5 / 3])
    assert np.mean([row.reward for row in rows]) == pytest.approx(0.5)
    assert reward.fired["ties"] == (4.0, 18.0)


def test_a_comparison_without_a_clear_word_is_left_out(make_row: Make, services: Any) -> None:
    def says(question: str) -> str:
        if "Answer 1:\npaper" in question:
            raise ChatFailed("down")
        return "Hard to say." if "scissors" in question else beats(question)

    rows = [make_row(text, sample=i) for i, text in enumerate(["rock", "paper", "scissors"])]
    build("spo", says).reward(rows, services)
    assert [row.reward for row in rows] == [0.0, 1.0, None]


RUBRIC = [{"criterion": "names the sum", "weight": 3}, {"criterion": "shows a step"}, "is short"]


def test_a_rubric_pays_the_weighted_share_of_its_criteria_and_notes_the_failed_ones(
    make_row: Make, services: Any
) -> None:
    prompt = Prompt.make("q", extra={"rubric": RUBRIC})

    def says(question: str) -> str:
        if "odd" in question:
            return "Who knows."
        met = ("sum" in question and "7" in question) or "short" in question
        return "Yes." if met else "No, not at all. no"

    rows = [make_row(text, sample=i, prompt=prompt) for i, text in enumerate(["7", "8", "odd"])]
    reward = build("rubric", says)
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [4 / 5, 1 / 5, None]
    assert [sorted(row.notes) for row in rows] == [["rubric/failed/1"], ["rubric/failed/0", "rubric/failed/1"], []]
    assert reward.fired["met"] == (3.0, 6.0)


@pytest.mark.parametrize("column", [None, [], [{"criterion": "a", "weight": 0}], [{"weight": 1}], [3]])
def test_criteria_that_cannot_be_read_are_refused(column: Any) -> None:
    with pytest.raises(DataError, match="rubric"):
        criteria_of(Prompt.make("q", extra={"rubric": column}), "rubric")


def test_a_right_answer_earns_half_more_where_its_reasoning_leads_to_it(make_row: Make, services: Any) -> None:
    asked: list[str] = []

    def says(question: str) -> str:
        asked.append(question)
        return "yes" if "because" in question else "No." if "guess" in question else "?"

    formed = "<think>{}</think><answer>1</answer>".format
    rows = [
        make_row(formed("because"), 1.0, sample=0),
        make_row(formed("guess"), 1.0, sample=1),
        make_row("because", 0.5, sample=2),
        make_row(formed("because"), 0.0, sample=3),
        make_row("<answer>1</answer><think>because</think>", 1.0, sample=4),
        make_row(formed("hm"), 1.0, sample=5),
        make_row(formed("because"), None, sample=6),
    ]
    reward = build("consistency", says)
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [2.0, 1.5, 0.75, 0.5, 1.5, None, None]
    assert len(asked) == 5  # not about the wrong one, nor about the one that was not judged
    assert reward.fired["consistent"] == (3.0, 4.0)


def test_each_turn_is_paid_its_grade_and_the_last_one_the_verdict_too(make_row: Make, services: Any) -> None:
    told: list[str] = []

    def says(question: str) -> str:
        told.append(question)
        return {"c": "Grade: 8/10", "f": "2", "h": "well"}[question[-1]]

    def episode(text: str, value: float | None) -> Row:
        row = make_row(value=value)
        row.prompt_ids, row.response_ids = (np.frombuffer(x.encode(), np.uint8).astype(np.uint32) for x in ("ab", text))
        row.loss_mask, row.turns = np.ones(len(text), np.bool_), ((0, 1), (2, len(text)))
        return row

    rows = [episode("xcef", 1.0), episode("xceh", 1.0), episode("xcef", None)]
    reward = build("turn_judge", says, weight=0.5, question="{answer}")
    reward.reward(rows, services)
    assert told == ["abxc", "abxcef", "abxc", "abxceh"]
    assert rows[0].turn_rewards == pytest.approx((0.4, 1.1)) and reward_of(rows[0]) == 1.0
    assert rows[1].turn_rewards == rows[2].turn_rewards == ()
    assert reward.fired == {"unknown": (1.0, 4.0), "grade": (1.0, 2.0)}


def test_a_text_has_a_criterion_per_line() -> None:
    assert criteria_of(Prompt.make("x", extra={"rubric": "is short"}), "rubric") == [("is short", 1.0)]
    assert criteria_of(Prompt.make("x", extra={"rubric": "is\nshort"}), "rubric") == [("is", 1.0), ("short", 1.0)]
