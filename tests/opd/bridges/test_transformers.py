"""A fleet's teacher, called as a model of transformers, gives what the model itself gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.bridges.transformers import FleetModel
from opd.errors import InvalidRequestError
from opd.fleet import TeacherFleet

IDS = torch.tensor([[0, 0, 5, 9, 11, 7, 0], [6, 7, 5, 8, 9, 10, 12], [0, 4, 4, 0, 0, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]])
"""Prompts padded on the left and answers on the right, as trainers put them beside each other."""


@pytest.fixture
def fleet(lone_teacher: Any) -> Any:
    with TeacherFleet.connect(lone_teacher.address) as fleet:
        yield fleet


@pytest.fixture
def truth(world: Path) -> torch.Tensor:
    """The log-probs of the model, each row read alone."""
    model = AutoModelForCausalLM.from_pretrained(world / "teacher", dtype=torch.float32)
    found = torch.zeros(*IDS.shape, model.config.vocab_size)
    with torch.no_grad():
        for ids, mask, out in zip(IDS, MASK.bool(), found, strict=True):
            out[mask] = model(ids[mask][None]).logits[0]
    return found.log_softmax(-1)


def test_its_logits_are_those_of_the_model(fleet: Any, truth: torch.Tensor) -> None:
    logits = FleetModel(fleet, "teacher", states="f32")(IDS, MASK).logits
    real = MASK.bool()
    assert torch.allclose(logits.log_softmax(-1)[real], truth[real], atol=1e-4)


def test_only_the_last_positions_travel_if_no_others_are_asked_for(fleet: Any, truth: torch.Tensor) -> None:
    before = fleet.status().counters.wire_bytes
    model = FleetModel(fleet, "teacher")
    logits = model(IDS, MASK, logits_to_keep=3, use_cache=False).logits
    travelled = fleet.status().counters.wire_bytes - before
    real = MASK[:, -3:].bool()
    assert logits.shape[1] == 3
    assert torch.allclose(logits.log_softmax(-1)[real], truth[:, -3:][real], atol=0.05)
    assert travelled == real.sum() * model.config.hidden_size * 2  # bfloat16


@pytest.mark.parametrize("given", [{"inputs_embeds": torch.zeros(1, 2, 8)}, {"use_cache": True}])
def test_what_a_fleet_cannot_read_is_refused(fleet: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(given))):
        FleetModel(fleet, "teacher")(IDS, MASK, **given)
