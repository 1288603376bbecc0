"""ALM against the numbers of the published code, and the chunks that it loses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opd_zoo.distil.alm import _closed, chunk_loss

STUDENT, TEACHER = torch.tensor([-0.719101, -0.544238]), torch.tensor([-0.987670, -0.570481])


@pytest.mark.parametrize(
    ("form", "temperature", "want"),
    [
        ("kl", 1.0, [0.026695, 0.000462]),
        ("kl", 100.0, [0.044865, 0.000623]),
        ("tvd", 1.0, [0.229493, 0.030061]),
        ("tvd", 100.0, [0.537138, 0.052486]),
    ],
)
def test_the_losses_are_those_of_the_published_code(form: str, temperature: float, want: list[float]) -> None:
    torch.testing.assert_close(chunk_loss(STUDENT, TEACHER, form, temperature), torch.tensor(want), atol=2e-6, rtol=0)


def closed(span: list[int], of: list[int]) -> list[int]:
    translation = SimpleNamespace(of=np.array(of))
    row: Any = SimpleNamespace(length=len(span), translations={"t": translation})
    return [max(-1, one) for one in _closed(row, np.array(span)).tolist()]


def test_a_published_chunk_closes_only_at_a_token_of_the_same_text() -> None:
    assert closed([0, 1], [0, 0, 1]) == [0, 0]  # ab . against a b .
    assert closed([0], [0, 0]) == [-1]  # ab alone
    assert closed([0, 1, 2, 3, 4], [0, 1, 1, 2, 3, 3, 4]) == [0, 1, 1, 3, 3]
    assert closed([0, 0, 2, -1], [0, 2]) == [0, 0, 0, -1]


def test_certain_chunks_have_a_finite_gradient() -> None:
    for form in ("kl", "tvd"):
        for temperature in (1.0, 100.0):
            log_p = torch.zeros(3, requires_grad=True)
            (gradient,) = torch.autograd.grad(chunk_loss(log_p, -torch.rand(3), form, temperature).sum(), log_p)
            assert gradient.isfinite().all()
