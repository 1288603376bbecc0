"""Importance ratios at every grain: worked examples, masks, and the denominators."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from student.data.needs import STUDENT
from student.plugin.terms import build_terms
from student.rl.losses.ratios import at_grain, least_before, prefix_sum, turn_index


@pytest.fixture
def batch(toy: Any) -> Any:
    made = toy(lengths=(3, 1, 4), group=1, masked=False)
    made.rows[2].turns = ((0, 2), (3, 4))
    return made.batch()


LOGS = torch.tensor([0.5, 2.0, 1.5, 3.0, 2.0, 4.0, 1.0, 9.0], dtype=torch.float64).log()


def test_each_grain_of_a_worked_example(batch: Any) -> None:
    def grain(name: Any) -> list[float]:
        return at_grain(LOGS, batch, name).exp().tolist()

    third = 1.5 ** (1 / 3)
    assert grain("token") == pytest.approx([0.5, 2, 1.5, 3, 2, 4, 1, 9])
    assert grain("sequence") == pytest.approx([third] * 3 + [3] + [72**0.25] * 4)
    assert grain("response") == pytest.approx([1.5] * 3 + [3] + [72] * 4)
    # The third token of the last row is the environment's: it belongs to the turn before it.
    assert grain("turn") == pytest.approx([third] * 3 + [3] + [2] * 3 + [9])
    assert grain("prefix") == pytest.approx([0.5, 1, 1.5, 3, 2, 8, 8, 72])


def test_masked_tokens_count_in_no_ratio(batch: Any) -> None:
    mask = torch.tensor([True, False, True, True, True, True, False, True])
    masked = dataclasses.replace(batch, mask=mask)
    logs = torch.where(mask, LOGS, torch.zeros_like(LOGS))
    assert at_grain(logs, masked, "sequence").exp()[:3].tolist() == pytest.approx([0.75**0.5] * 3)
    assert at_grain(logs, masked, "turn").exp()[4:].tolist() == pytest.approx([8**0.5] * 3 + [9])
    assert prefix_sum(logs, masked).exp().tolist() == pytest.approx([0.5, 0.5, 0.75, 3, 2, 8, 8, 72])
    assert least_before(logs, masked).exp().tolist() == pytest.approx([1, 0.5, 0.5, 1, 1, 2, 2, 2])


def test_turns_are_counted_over_the_micro_batch(batch: Any) -> None:
    index, count = turn_index(batch)
    assert (index.tolist(), count) == ([0, 0, 0, 1, 2, 2, 2, 3], 4)


@pytest.mark.parametrize("grain", ["token", "turn", "sequence", "prefix"])
def test_on_policy_every_grain_has_the_gradient_of_reinforce_up_to_its_weights(toy: Any, grain: str) -> None:
    made = toy(lengths=(1, 1, 1, 1), masked=False)
    plain = made.gradient(build_terms([{"name": "policy_gradient", "ratio": "none"}]))
    found = made.gradient(build_terms([{"name": "policy_gradient", "ratio": grain}]))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-9)


def test_the_ratio_can_be_to_the_student_when_the_rows_were_scored(toy: Any) -> None:
    made = toy(lengths=(2, 2), masked=False)
    (term,) = build_terms([{"name": "policy_gradient", "ratio_to": "old"}])
    assert [need.role for need in term.needs().signals] == [STUDENT]
    term.prepare(made.rows)
    metrics = term.token_losses(made.batch()).metrics
    old = made.logp(*made.models[STUDENT]).gather(1, made.token_ids[:, None])[:, 0]
    expected = (made.behaviour - old).exp().sum()
    assert float(metrics["ratio"][0]) == pytest.approx(float(expected), rel=1e-6)
    assert abs(float(expected) - 4) > 1e-3


def test_a_dual_clip_bounds_the_ratio_of_bad_tokens_alone(toy: Any) -> None:
    made = toy(lengths=(1, 1), group=2, masked=False)
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - math.log(5)
    found = {}
    for dual in (None, 3.0):
        entry = {"name": "policy_gradient", "advantage": {"name": "leave_one_out"}, "dual_clip": dual}
        (term,) = build_terms([entry])
        term.prepare(made.rows)
        found[dual] = term.token_losses(made.batch())
    # The first row is right (A = 1), the second wrong (A = -1).
    assert found[None].loss.tolist() == pytest.approx([-5, 5])
    assert found[3.0].loss.tolist() == pytest.approx([-5, 3])
    assert float(found[3.0].metrics["clipped_share"][0]) == 1
