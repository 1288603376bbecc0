"""RLGF's roll-in: how often a guide begins an answer, where it is cut, and what happens without the guide."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import make_row
from thread_ranks import build

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.chat import ChatFailed
from opd.tasks.prompt import Prompt
from opd_zoo.curricula.roll_in import RollIn, RollInSettings
from student.data.outcome import outcome_of
from student.data.plan import StepPlan, plan_step

PROMPTS = [Prompt.make(text) for text in ("1+1=", "2+2=")]


class Bytes:
    def __call__(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
        return {"input_ids": list(text.encode()) if isinstance(text, str) else [list(one.encode()) for one in text]}


def planned(samples: int = 200, longest: int = 50) -> StepPlan:
    return plan_step(0, PROMPTS, samples=samples, max_new_tokens=longest, temperature=1.0)


def guided(says: Any, **settings: Any) -> RollIn:
    made = RollIn(parse_settings(RollInSettings, {"name": "roll_in", "teacher": CHAT, **settings}))
    made._client.go_on = says  # type: ignore[method-assign]
    made.services = SimpleNamespace(tokenizer=Bytes(), gather=lambda value: [value], outcomes=[])  # type: ignore[assignment]
    return made


CHAT = {"endpoint": "http://x/v1", "model": "m"}


def test_a_share_of_the_answers_begins_with_a_part_of_the_guides_cut_uniformly() -> None:
    asked: list[str] = []

    def says(ids: list[int]) -> str:
        asked.append(bytes(ids).decode())
        return "0123456789"

    made = guided(says, share=0.7)
    rows = made.plan(planned()).rows
    assert asked == ["1+1=", "2+2="] and rows == made.plan(planned()).rows
    begun = [row for row in rows if row.prefix_ids]
    assert np.mean([bool(row.prefix_ids) for row in rows]) == np.clip(len(begun) / 400, 0.62, 0.78)
    for row in begun:
        assert bytes(row.prefix_ids) == b"0123456789"[: len(row.prefix_ids)] and row.key.parent == row.key.sample
        assert row.max_new_tokens == 50 - len(row.prefix_ids)
    counts = np.bincount([len(row.prefix_ids) for row in begun], minlength=11)
    assert counts[0] == 0 and counts[1:].min() > 0.4 * counts.mean()
    assert not any(row.prefix_ids for row in rows if row.key.parent == -1)


def test_a_beginning_leaves_room_for_the_student_and_a_given_one_stays() -> None:
    made = guided(lambda ids: "0123456789", share=1.0)
    plan = planned(3, longest=4)
    plan = replace(plan, rows=(replace(plan.rows[0], prefix_ids=(7,)), *plan.rows[1:]))
    first, *others = made.plan(plan).rows
    assert first.prefix_ids == (7,) and first.key.parent == -1
    assert all(1 <= len(row.prefix_ids) <= 3 and row.max_new_tokens >= 1 for row in others)


def test_without_the_guide_the_student_begins_at_the_start_and_the_first_rank_decides() -> None:
    def fails(ids: list[int]) -> str:
        raise ChatFailed("down")

    alone = guided(fails)
    assert alone.plan(planned(2)).rows == planned(2).rows
    alone.services.gather = lambda value: [["01", "01"], value]  # type: ignore[method-assign]
    assert any(row.prefix_ids for row in alone.plan(planned(8)).rows)


@pytest.mark.parametrize("make", [lambda: guided(str), lambda: build("cure"), lambda: build("svs")])
def test_prompts_that_are_played_are_refused(make: Any) -> None:
    make().check_prompts(PROMPTS)
    with pytest.raises(ConfigError, match="played in an environment"):
        make().check_prompts([*PROMPTS, Prompt.make("q", extra={"environment": {"name": "lock"}})])


def test_it_shows_how_many_answers_it_began_and_how_far() -> None:
    made = guided(lambda ids: "0123")
    rows = [make_row(5, sample=i) for i in range(4)]
    for row, given in zip(rows[:2], (1, 3), strict=True):
        row.key, row.turns = replace(row.key, parent=row.key.sample), ((given, 5),)
    found = made.compose(rows)
    made.services.outcomes = [outcome_of(row) for row in found]  # type: ignore[misc]
    assert made.after_update(0, made.services) == {"roll_in/share": 0.5, "roll_in/tokens": 2.0}
