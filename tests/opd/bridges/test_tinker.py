"""What Tinker's cookbook asks of a teacher client, answered by a fleet.

tinker 0.38.0, lib/public_interfaces/sampling_client.py: 648-720; tinker-cookbook 0.6.1,
distillation/train_on_policy.py: 81-98 (the first entry is dropped).
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from opd.bridges.tinker import FleetTeacher
from opd.errors import InvalidRequestError
from opd.fleet import TeacherFleet
from opd.wire.types import PayloadSpec, ScoreItem

IDS = [5, 9, 11, 7, 8]


@dataclass
class ModelInput:
    """Tinker's, as far as it is used."""

    ids: list[int]

    def to_ints(self) -> list[int]:
        return self.ids


@pytest.fixture
def fleet(lone_teacher: Any) -> Any:
    with TeacherFleet.connect(lone_teacher.address) as fleet:
        yield fleet


def test_a_sequence_gets_its_log_probs_in_every_way_that_tinker_has(fleet: Any) -> None:
    teacher = FleetTeacher(fleet, "teacher")
    (scores,) = fleet.score("teacher", [ScoreItem(IDS, 1)], PayloadSpec.sampled())
    truth = [None, *scores.sampled.tolist()]

    async def cookbook() -> list[Any]:
        gathered = await asyncio.gather(*[teacher.compute_logprobs(ModelInput(IDS)).coroutine() for _ in range(2)])
        return [
            *gathered,
            await teacher.compute_logprobs(ModelInput(IDS)),
            await teacher.compute_logprobs_async(ModelInput(IDS)),
        ]

    assert asyncio.run(cookbook()) == [truth] * 4
    assert teacher.compute_logprobs(ModelInput(IDS)).result() == truth


def test_the_last_n_may_be_asked_for_alone(fleet: Any) -> None:
    teacher = FleetTeacher(fleet, "teacher", temperature=0.7)
    whole, last = (teacher.compute_logprobs(ModelInput(IDS), n).result() for n in (None, 2))
    assert last[:3] == [None] * 3 and np.allclose(last[3:], whole[3:], atol=1e-5)
    for n in (0, 5):
        with pytest.raises(InvalidRequestError, match="prompt_logprobs_last_n"):
            teacher.compute_logprobs(ModelInput(IDS), n)
