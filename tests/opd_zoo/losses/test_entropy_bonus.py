"""The entropy bonus: its value and gradient are those of the entropy that autograd sees."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opd.heads import OutputHead
from student.plugin.terms import build_terms


@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, 0.0), (0.7, 0.0), (1.0, 2.0)])
def test_value_and_gradient_are_those_of_the_exact_entropy(toy: Any, temperature: float, soft_cap: float) -> None:
    made = toy()
    (term,) = build_terms([{"name": "entropy_bonus"}])
    made.hidden = made.hidden.clone().requires_grad_()
    batch = made.batch()
    head = OutputHead(made.head, soft_cap=soft_cap)
    weights = torch.linspace(0.1, 1.0, len(batch.mask), dtype=torch.float32) * batch.mask
    student = dataclasses.replace(batch.student, head=head)
    output = term.token_losses(dataclasses.replace(batch, student=student, weights=weights, temperature=temperature))
    logits = made.hidden @ made.head.T
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    (found,) = torch.autograd.grad(output.total, made.hidden)
    expected_total = -(entropy * weights).sum()
    (expected,) = torch.autograd.grad(expected_total, made.hidden)
    assert output.total.item() == pytest.approx(expected_total.item(), rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    top, count = output.metrics["student_entropy"]
    assert float(top) == pytest.approx(entropy[batch.mask].sum().item(), rel=1e-6) and int(count) == int(
        batch.mask.sum()
    )


def test_padded_rows_of_the_head_are_outside_the_entropy(toy: Any) -> None:
    made = toy(masked=False)
    (term,) = build_terms([{"name": "entropy_bonus"}])
    batch = made.batch()
    padded = torch.cat([made.head, 9 * torch.ones(3, made.width, dtype=torch.float64)])
    student = dataclasses.replace(batch.student, head=OutputHead(padded))
    one, other = term.token_losses(batch), term.token_losses(dataclasses.replace(batch, student=student))
    torch.testing.assert_close(one.total, other.total)


def test_steps_with_the_bonus_raise_the_entropy_of_the_student(bench: Callable[..., Any]) -> None:
    made = bench({"name": "entropy_bonus"})
    rows = made.rows()
    found = [made.step(rows, step)["student_entropy"] for step in range(5)]
    assert found == sorted(found) and found[-1] > 1.05 * found[0]
