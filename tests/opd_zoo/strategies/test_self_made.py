"""RGR-GRPO and SvS: what the student makes of its own answers, and which of it joins the step."""

from typing import Any

import pytest
from thread_ranks import build, metrics_of, of, place, sampled, together

from opd_zoo.strategies.svs import SYNTHESIS
from student.data.outcome import outcome_of
from student.data.plan import PlannedRow
from student.data.row import Row

RUBRIC = ["is short", {"criterion": "is right", "weight": 2}]


def graded(planned: PlannedRow) -> Row:
    """Answers earn 0, 0.1 ...; those of some prompts pass, and some refinements are better than all before."""
    planned.prompt.extra["rubric"] = RUBRIC
    hinted = planned.behaviour_prompt is not None
    value = planned.key.sample / 10
    if place(planned) == 0 and planned.key.sample == 1:
        value = 1.0
    row = sampled(planned, (0.9 if place(planned) == 1 else 0.0) if hinted else value)
    row.text = f"answer {planned.key.sample}"
    row.notes["rubric/failed/1"] = 1.0
    return row


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_none_passes_the_best_is_refined_and_takes_the_place_of_the_worst_if_it_is_better(ranks: int) -> None:
    told: list[str] = []

    def answer(planned: PlannedRow) -> Row:
        if planned.behaviour_prompt is not None:
            told.append(str(planned.behaviour_prompt.text))
        return graded(planned)

    parts = together(ranks, lambda: build("rubric_guide"), answer, plan=of(4), groups=6)
    rows = [row for part, _, _ in parts for row in part]
    for uid in {row.key.uid for row in rows}:
        mine = [row for row in rows if row.key.uid == uid]
        refined = [row for row in mine if row.origin == "hinted"]
        assert len(mine) == 4 and len(refined) == (int(uid, 16) % 3 == 1)
        if refined:
            assert {row.key.sample for row in mine} == {1, 2, 3, 4} and refined[0].verdict.value == 0.9
    assert len(told) == sum(int(uid, 16) % 3 != 0 for uid in {row.key.uid for row in rows})
    assert all("answer 3" in text and "- is right" in text and "is short" not in text for text in told)
    if ranks == 1:
        found = metrics_of(parts[0][1])
        assert 0 < found["rubric_guide/joined_share"] < found["rubric_guide/tried_share"] < 1
        assert found["rubric_guide/gain"] == pytest.approx(0.6)


class Author:
    """Half of its answers to some problems are right; of the two variants one is sometimes solved, the other always.

    Variants of other problems are not marked.
    """

    def __init__(self) -> None:
        self.posed: dict[str, str] = {}

    def __call__(self, planned: PlannedRow) -> Row:
        text = str(planned.prompt.text)
        if planned.key.agent == SYNTHESIS:
            row, uid = sampled(planned, 0.0), text.partition("so ")[2].split()[0]
            kind = ("fair", "easy")[planned.key.sample % 2]
            row.text = f"<problem>{kind} {uid}</problem>" if int(uid, 16) % 3 < 2 else "no marks"
            return row
        if text.startswith(("fair", "easy")):
            self.posed[text] = str(planned.prompt.answer)
            return sampled(planned, float(text.startswith("easy") or planned.key.sample % 2 == 0))
        row = sampled(planned, float(planned.key.sample % 2 == 0 and place(planned) != 1))
        row.text = f"so {planned.key.uid}"
        return row


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_variant_is_paid_where_it_is_sometimes_solved(ranks: int) -> None:
    author = Author()
    parts = together(ranks, lambda: build("svs"), author, plan=of(4), groups=6)
    rows = [row for part, _, _ in parts for row in part]
    variants = [row for row in rows if row.key.agent == SYNTHESIS]
    hard = {row.key.uid for row in rows if row.key.agent == "" and int(row.key.uid, 16) % 3 == 1}
    assert variants and not any(uid in row.text for uid in hard for row in variants)  # never solved: not rewritten
    assert not {row.key.uid for row in variants} & {row.key.uid for row in rows if row.key.agent == ""}
    for row in variants:
        assert outcome_of(row).reward == float("fair" in row.text)
    answers = [row for row in rows if str(row.prompt.text).startswith(("fair", "easy"))]
    first = {row.prompt.uid: row.prompt.answer for row in rows if "+" in str(row.prompt.text)}
    assert len(answers) == 4 * len(author.posed)
    assert all(first[text.split()[1]] == given for text, given in author.posed.items())
    assert len({row.key for row in rows}) == len(rows)
    if ranks == 2:
        return
    found = metrics_of(parts[0][1])
    assert 0 < found["svs/rewritten_share"] < 1 and 0 < found["svs/paid_share"] < found["svs/posed_share"] < 1


def test_a_variant_that_is_too_long_is_not_answered() -> None:
    author: Any = Author()
    ((rows, sampling, _),) = together(
        1, lambda: build("svs", text="{response}"), author, plan=of(4), groups=6, longest=20
    )
    assert not author.posed and metrics_of(sampling)["svs/posed_share"] == 0
    assert all(outcome_of(row).reward == 0 for row in rows if row.key.agent == SYNTHESIS)
