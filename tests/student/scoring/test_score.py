"""What the scorer sends, and when; and waiting for answers row by row, while a teacher of other rows is away."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.config import parse_settings
from opd.errors import OutageError
from opd.fleet.client import TeacherFleet
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.source import ScoreSource
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.needs import TEACHER, Needs, SignalNeed
from student.data.row import Row, RowKey
from student.job.plugins import build_plugins
from student.scoring.score import Scoring
from student.scoring.verify import Verification
from student.settings.recipe import Recipe
from student.settings.teachers import TeacherSettings


@pytest.fixture
def asked(world: Path, teacher: Any) -> Iterator[tuple[ScoreSource, Scoring]]:
    recipe = parse_settings(
        Recipe,
        {
            "run": "unused",
            "model": {"path": str(world / "student")},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "teachers": {"endpoints": [teacher.address], "default": "teacher"},
            "objective": [{"name": "opd", "payload": "sampled"}],
        },
    )
    source = build_prompts(recipe.prompts, seed=0)
    verification = Verification(source, 1)
    with TeacherFleet.connect([teacher.address]) as fleet:
        needs = build_plugins(recipe).needs
        yield fleet, Scoring(fleet, recipe.teachers, needs, verification, torch.device("cpu"))
    verification.close()


def row(sample: int, length: int) -> Row:
    """Six tokens of a prompt and `length` of a response."""
    prompt = Prompt.make("10+20=")
    ids = np.random.default_rng(sample).integers(4, 260, size=6 + length, dtype=np.uint32)
    return Row(
        key=RowKey(0, prompt.uid, sample),
        prompt=prompt,
        prompt_ids=ids[:6],
        response_ids=ids[6:],
        behaviour_logp=np.zeros(length, np.float32),
        policy_version=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.bool_),
        truncated=False,
        text="",
    )


def submitted(fleet: ScoreSource) -> int:
    return fleet.status().counters.rows_submitted


def test_short_rows_wait_for_each_other_until_they_are_collected(asked: tuple[ScoreSource, Scoring]) -> None:
    fleet, scorer = asked
    rows = [row(sample, 10) for sample in range(5)]
    for one in rows:
        scorer.ask(one)
    assert submitted(fleet) == 0
    scorer.wait(rows)
    assert submitted(fleet) == 5
    items = [one.asked(gather=False)[0][0] for one in rows]
    for one, alone in zip(rows, fleet.score("teacher", items, PayloadSpec.sampled()), strict=True):
        found = one.signals[TEACHER, PayloadKind.SAMPLED].sampled
        assert found is not None and alone.sampled is not None
        np.testing.assert_allclose(found, alone.sampled, atol=1e-5)


def test_a_long_row_is_sent_as_it_ends_with_those_that_wait(asked: tuple[ScoreSource, Scoring]) -> None:
    fleet, scorer = asked
    rows = [row(0, 10), row(1, 505), row(2, 10)]
    counts = []
    for one in rows:
        scorer.ask(one)
        counts.append(submitted(fleet))
    assert counts == [0, 2, 2]
    scorer.wait(rows)
    assert submitted(fleet) == 3 and all(one.signals for one in rows)


class Pending:
    """A fleet whose answers come when the test gives them.

    Attributes:
        answers: one for each row that was submitted.
        outages: what it says of its teachers; called by whoever waits.
    """

    def __init__(self) -> None:
        self.answers: list[Future[Scores]] = []
        self.outages: Callable[[], list[Outage]] = list

    def teachers(self) -> list[str]:
        return ["a"]

    def submit_many(self, model: str, items: Sequence[ScoreItem], *_: Any, **__: Any) -> list[Future[Scores]]:
        futures: list[Future[Scores]] = [Future() for _ in items]
        self.answers += futures
        return futures

    def answer(self, number: int) -> None:
        self.answers[number].set_result(Scores(sampled=np.zeros(4, np.float32)))


def begun(count: int, hooks: OutageHooks | None = None) -> tuple[Pending, Scoring, list[Row]]:
    """A fleet that was asked about rows, and whose answers are awaited."""
    fleet: Any = Pending()
    needs = Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))
    scorer = Scoring(fleet, TeacherSettings(), needs, None, torch.device("cpu"), hooks=hooks)  # type: ignore[arg-type]
    rows = [row(sample, 4) for sample in range(count)]
    for one in rows:
        scorer.ask(one)
    scorer.begin(rows)
    return fleet, scorer, rows


def test_a_teacher_that_stays_away_is_not_said_to_be_back_when_rows_of_another_arrive() -> None:
    said: list[tuple[str, str]] = []
    hooks = OutageHooks(
        waiting=lambda outage: said.append(("away", outage.teacher)),
        emergency=lambda outage: said.append(("emergency", outage.teacher)),
        recovered=lambda outage: said.append(("back", outage.teacher)),
    )
    fleet, scorer, rows = begun(4, hooks)

    def outages() -> list[Outage]:  # whoever waits looks here, and the next answer arrives then
        fleet.answer(next(number for number, future in enumerate(fleet.answers) if not future.done()))
        return [Outage("a", 500.0, 1, "down", 1e4)]

    fleet.outages = outages
    for one in rows[:3]:
        scorer.arrive([one])
    assert said == [("away", "a"), ("emergency", "a")] and scorer.begun
    fleet.answer(3)
    scorer.arrive(rows)
    assert said[2:] == [("back", "a")] and not scorer.begun


def test_the_failure_of_a_row_is_that_of_who_waits_for_it_and_the_others_are_given_up() -> None:
    fleet, scorer, rows = begun(3)
    fleet.answer(0)
    fleet.answers[1].set_exception(OutageError("teacher 'a' stayed away."))
    assert scorer.late(rows) == 1
    scorer.arrive(rows[:1])
    with pytest.raises(OutageError):
        scorer.arrive(rows[1:2])
    scorer.give_up()
    assert [bool(one.signals) for one in rows] == [True, False, False]
    assert fleet.answers[2].cancelled() and not scorer.begun


def test_a_copy_of_a_row_waits_for_the_answers_about_the_row() -> None:
    fleet, scorer, rows = begun(2)
    fleet.answer(0)
    copy = replace(rows[0], weight=2.0)
    assert scorer.late([copy]) == 0 and scorer.late(rows) == 1
    scorer.arrive([copy])
    assert copy.signals and rows[0].signals and not rows[1].signals
