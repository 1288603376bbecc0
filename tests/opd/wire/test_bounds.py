"""What a teacher accepts, told before anything is sent, and what an answer will cost."""

import dataclasses

import numpy as np
import pytest

from opd.errors import IncompatibleTeacherError
from opd.wire.bounds import RequestBounds, check_items, reply_bytes
from opd.wire.types import PayloadSpec, ScoreItem


def test_a_teacher_that_scores_at_one_temperature_is_asked_for_no_other_but_for_hidden_states(
    bounds: RequestBounds,
) -> None:
    fixed = dataclasses.replace(bounds, supports_temperature=False)
    items = [ScoreItem(np.arange(4, dtype=np.uint32), 2)]
    with pytest.raises(IncompatibleTeacherError, match="temperature 1 only"):
        check_items(items, PayloadSpec.sampled(), 0.5, fixed)
    for spec, temperature, teacher in (
        (PayloadSpec.sampled(), 0.5, bounds),
        (PayloadSpec.sampled(), 1.0, fixed),
        (PayloadSpec.hidden(), 0.5, fixed),  # divided by whoever turns them into logits
    ):
        check_items(items, spec, temperature, teacher)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (PayloadSpec.sampled(), 4),
        (PayloadSpec.topk(8), 8 * (2 + 4) + 16),
        (PayloadSpec.topk(8, "f32"), 8 * (4 + 4) + 16),
        (PayloadSpec.gather(8), 8 * 2 + 16),
        (PayloadSpec.hidden(), 32 * 2),
        (PayloadSpec.hidden("f32"), 32 * 4),
        (PayloadSpec.full(), 100 * 4),
    ],
    ids=str,
)
def test_an_answer_costs_its_bytes_per_position(spec: PayloadSpec, size: int) -> None:
    assert reply_bytes(spec, 10, 100, 32) == 10 * size
