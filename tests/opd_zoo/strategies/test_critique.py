"""Critique-GRPO: which refinement takes the last place of a group, and what it was told."""

from typing import Any

import pytest
from judge_servers import serving
from thread_ranks import build, metrics_of, of, place, sampled, together

from opd.config import parse_settings
from opd.errors import ConfigError
from opd_zoo.strategies.critique import CritiqueSettings
from student.data.plan import PlannedRow
from student.data.row import Row


class Student:
    """Right: the second answer of some prompts, and refinements of the second and third answer of others."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, planned: PlannedRow) -> Row:
        if planned.behaviour_prompt is None:
            row = sampled(planned, float(place(planned) == 0 and planned.key.sample == 1))
            row.text = f"{{critique}} {planned.key.sample}"
            return row
        text = str(planned.behaviour_prompt.text)
        self.told.append(text)
        return sampled(planned, float(place(planned) == 1 and ("} 1" in text or "} 2" in text)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_answer_is_refined_and_the_first_best_refinement_joins_the_group(ranks: int) -> None:
    student = Student()
    parts = together(ranks, lambda: build("critique"), student, plan=of(4), groups=6)
    rows = [row for part, _, _ in parts for row in part]
    for uid in {row.key.uid for row in rows}:
        mine = [row for row in rows if row.key.uid == uid]
        (refined,) = [row for row in mine if row.origin == "hinted"]
        helped = int(uid, 16) % 3 == 1
        assert len(mine) == 4 and refined.verdict.value == helped
        # Samples 0 to 2 were planned, and their refinements are the next ones in order.
        assert {row.key.sample for row in mine if row.on_policy} == {0, 1, 2}
        assert refined.key.sample == (5 if helped else 4)
    assert len(student.told) == 18
    found = metrics_of(parts[0][1])
    assert found["critique/refined_share"] == 1 and 0 < found["critique/right_share"] < 1
    assert -1 <= found["critique/gain"] <= 1 and found["hinted_share"] == 0.25


@pytest.mark.parametrize("critique", ["verdict", "answer"])
def test_a_critique_tells_the_verdict_and_where_it_may_the_answer(critique: str) -> None:
    student = Student()
    together(1, lambda: build("critique", critique=critique), student, plan=of(4), groups=6)
    assert all("{critique} " in text for text in student.told)  # an answer that looks like a place is left alone
    assert all(("The answer is" in text) == (critique == "answer") for text in student.told)
    right = [text for text in student.told if "The solution is right." in text]
    assert right and all("} 1" in text for text in right)
    assert len(right) < len(student.told) and all(("right." in text) != ("wrong." in text) for text in student.told)


def test_a_critic_reads_wrong_answers_with_the_solution_and_may_be_missing() -> None:
    with serving() as judge:
        judge.say = lambda path, body: {"choices": [{"message": {"content": "You forgot to carry."}}]}
        chat = {"endpoint": f"{judge.url}/v1", "model": "critic", "attempts": 1}
        settings: dict[str, Any] = {
            "critique": "text",
            "critic": chat,
            "column": "carries",
            "question": "{solution}|{response}",
        }

        def answer(planned: PlannedRow) -> Row:
            row = student(planned)
            row.prompt.extra["carries"] = "none {response}"
            return row

        student = Student()
        ((_, sampling, _),) = together(1, lambda: build("critique", **settings), answer, plan=of(4), groups=6)
        asked = [body["messages"][0]["content"] for _, body, _ in judge.asked]
        assert asked and all(text.startswith("none {response}|{critique} ") for text in asked)
        wrong = [text for text in student.told if "right." not in text]
        assert wrong and all("You forgot to carry." in text for text in wrong)
        assert metrics_of(sampling)["critique/unanswered_share"] == 0
        judge.say = lambda path, body: 400
        student = Student()
        settings["question"] = "again {response}"
        ((_, sampling, _),) = together(1, lambda: build("critique", **settings), answer, plan=of(4), groups=6)
        assert metrics_of(sampling)["critique/unanswered_share"] == 1
        assert all("The answer is" in text for text in student.told)


def test_a_group_whose_refinements_do_not_fit_is_one_answer_smaller() -> None:
    ((rows, sampling, _),) = together(1, lambda: build("critique"), Student(), plan=of(4), groups=6, longest=20)
    assert len(rows) == 18 and all(row.on_policy for row in rows)
    found = metrics_of(sampling)
    assert found["critique/refined_share"] == 0 and found["hint/too_long_share"] == 1


@pytest.mark.parametrize("settings", [{"critique": "text"}, {"critic": {"endpoint": "http://x/v1", "model": "m"}}])
def test_a_critic_belongs_to_critique_text(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="critic"):
        parse_settings(CritiqueSettings, {"name": "critique", **settings})
