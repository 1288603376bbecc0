"""What the scorer sends to a real server, and when."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.config import parse_settings
from opd.fleet.client import TeacherFleet
from opd.fleet.source import ScoreSource
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER
from student.data.row import Row, RowKey
from student.job.plugins import build_plugins
from student.scoring.score import Scorer
from student.scoring.verify import Verification
from student.settings.recipe import Recipe


@pytest.fixture
def asked(world: Path, teacher: Any) -> Iterator[tuple[ScoreSource, Scorer]]:
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
        yield fleet, Scorer(fleet, recipe.teachers, needs, verification, torch.device("cpu"))
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


def test_short_rows_wait_for_each_other_until_they_are_collected(asked: tuple[ScoreSource, Scorer]) -> None:
    fleet, scorer = asked
    rows = [row(sample, 10) for sample in range(5)]
    for one in rows:
        scorer.submit(one)
    assert submitted(fleet) == 0
    scorer.collect(rows)
    assert submitted(fleet) == 5
    items = [one.asked(gather=False)[0][0] for one in rows]
    for one, alone in zip(rows, fleet.score("teacher", items, PayloadSpec.sampled()), strict=True):
        found = one.signals[TEACHER, PayloadKind.SAMPLED].sampled
        assert found is not None and alone.sampled is not None
        np.testing.assert_allclose(found, alone.sampled, atol=1e-5)


def test_a_long_row_is_sent_as_it_ends_with_those_that_wait(asked: tuple[ScoreSource, Scorer]) -> None:
    fleet, scorer = asked
    rows = [row(0, 10), row(1, 505), row(2, 10)]
    counts = []
    for one in rows:
        scorer.submit(one)
        counts.append(submitted(fleet))
    assert counts == [0, 2, 2]
    scorer.collect(rows)
    assert submitted(fleet) == 3 and all(one.signals for one in rows)
