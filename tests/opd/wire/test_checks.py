"""Checks that look at bits agree with arithmetic, bit for bit; checks in blocks miss no position."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opd.errors import CorruptPayloadError
from opd.wire import checks
from opd.wire.checks import check_positions, finite_bf16
from opd.wire.tensors import bf16_to_f32
from opd.wire.types import PayloadSpec, Scores


def test_every_bfloat16_is_told_finite_or_not() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(bf16_to_f32(bits))
    assert [finite_bf16(bits[n : n + 1]) for n in range(1 << 16)] == finite.tolist()
    assert finite_bf16(bits[finite].reshape(2, -1))
    for bad in bits[~finite]:
        assert not finite_bf16(np.append(bits[finite], bad))


def set_values(scores: Scores, row: int) -> None:
    scores.values[row, 3] = 0.5


def repeat_id(scores: Scores, row: int) -> None:
    scores.ids[row, 3] = scores.ids[row, 4]


def swap_values(scores: Scores, row: int) -> None:
    scores.values[row, [0, 7]] = scores.values[row, [7, 0]]


def lose_mass(scores: Scores, row: int) -> None:
    scores.log_tail[row] = -20.0


def contradict(scores: Scores, row: int) -> None:
    scores.sampled[row] = 0.0


@pytest.mark.parametrize("block", [1, 16, 24, 1 << 16])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (set_values, "above zero"),
        (repeat_id, "listed twice"),
        (swap_values, "descending"),
        (lose_mass, "token {row}, tail included, add up"),
        (contradict, "token {row} contradicts"),
    ],
)
def test_a_bad_position_is_found_and_named_in_whichever_block_it_stands(
    block: int, spoil: Callable[[Scores, int], None], message: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "BLOCK", block)
    for row in range(7):
        c = case(PayloadSpec.topk(8, "f32"))
        s = c.scores

        def check(s: Scores = s, response: Any = c.item.response_ids) -> None:
            check_positions(s.sampled, response, s.ids, s.values, s.log_tail, vocab_size=300, tolerance=2e-3)

        check()
        spoil(s, row)
        with pytest.raises(CorruptPayloadError, match=message.format(row=row)):
            check()


def test_a_token_less_likely_than_a_half_can_say_does_not_contradict_the_top_of_its_position() -> None:
    # As of a model that sets what it forbids to a very low logit: -70,000 has become -inf, and the token is below it.
    values = np.float16([[0.0, -np.inf]])
    sampled, ids = np.float32([-8e4]), np.uint32([[1, 2]])
    check_positions(sampled, np.uint32([3]), ids, values, np.float32([-8e4]), vocab_size=9, tolerance=2e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_must_be_finite_but_where_an_id_is_impossible(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, :4] = -np.inf
    checks.check_logits(logits)
    with pytest.raises(CorruptPayloadError, match="a row without a finite value"):
        checks.check_logits(np.where(np.arange(3)[:, None] == 1, np.float32(-np.inf), logits))
    logits[2, 2] = bad
    with pytest.raises(CorruptPayloadError, match="NaN"):
        checks.check_logits(logits)
