"""Shaped token rewards against the numbers of released code and of formulas worked out by hand."""

import pytest
import torch
from torch import Tensor, tensor

from opd_zoo.distil.compressed import compress
from opd_zoo.distil.gated_exopd import gate
from opd_zoo.distil.iw_opd import prefix_weights
from opd_zoo.distil.tail_null import tail_advantages
from opd_zoo.distil.tide import excess, worst

D = tensor([-0.1, -2.5, 0.4, -0.1])
"""log T - log S of a response of four tokens, which several papers' formulas are worked out on."""


def one(values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(values), dtype=torch.long), torch.ones(len(values), dtype=torch.bool)


def test_iw_opd_weighs_a_prefix_as_the_released_code_does() -> None:
    weights = prefix_weights(D, *one(D), 0.5, normalise=False)
    torch.testing.assert_close(weights, tensor([1.5, 1.4838710, 1.0806452, 1.0161290]))
    torch.testing.assert_close(weights * D, tensor([-0.15, -3.7096774, 0.4322581, -0.1016129]))
    even = tensor([-1.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(
        prefix_weights(even, *one(even), 0.5, normalise=False), tensor([1.5, 1.375, 1.25, 1.125])
    )
    assert prefix_weights(D, *one(D), 0.0, normalise=False).eq(1).all()
    torch.testing.assert_close(prefix_weights(D, *one(D), 0.5, normalise=True).mean(), tensor(1.0))


def test_iw_opd_knows_no_other_response_and_no_masked_token() -> None:
    both = torch.cat([D, tensor([7.0]), D])
    row = tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    mask = tensor([True] * 4 + [False] + [True] * 4)
    weights = prefix_weights(both, row, mask, 0.5, normalise=False)
    alone = prefix_weights(D, *one(D), 0.5, normalise=False)
    torch.testing.assert_close(weights, torch.cat([alone, tensor([1.0]), alone]))


def test_the_log_form_keeps_signs_and_has_slope_one_at_zero() -> None:
    torch.testing.assert_close(
        compress(tensor([-25.0, -1.0, 0.5, 12.0])), tensor([-3.2580965, -0.6931472, 0.4054651, 2.5649494])
    )
    torch.testing.assert_close(compress(D), tensor([-0.0953102, -1.2527630, 0.3364722, -0.0953102]))


def test_the_gate_of_extrapolation_is_nearly_an_indicator() -> None:
    x = tensor([0.05, 0.1, -0.1, 0.2, -0.2], dtype=torch.float64)
    expected = tensor([0.8339472, 0.4777333, 0.5010448, 0.0470033, 0.0688502], dtype=torch.float64)
    torch.testing.assert_close(gate(x, 0.007), expected, atol=1e-6, rtol=0)
    assert gate(tensor([0.0]), 0.007).item() == 1.0
    r = tensor([0.4, -1.0, 0.4, 0.0])
    torch.testing.assert_close(
        D + 0.5 * gate(D, 0.007) * r, tensor([0.0002090, -2.5, 0.4000004, -0.1]), atol=1e-5, rtol=0
    )


def test_the_entropy_form_of_the_null_punishes_the_most_uncertain_unlikely_token_most() -> None:
    logp = tensor([-10.0, -9.0, -8.0, -1.0])
    entropy = tensor([2.0, 99.0, 4.0, 0.0])
    row, mask = torch.zeros(4, dtype=torch.long), tensor([True, False, True, True])
    found = tail_advantages(logp, entropy, row, mask, 0.5, -1.0, -0.5)
    torch.testing.assert_close(found, tensor([-0.5, 0.0, -1.0, 0.0]))  # the masked token's 99 is not in the range
    equal = tail_advantages(tensor([-3.0, -2.0]), tensor([1.0, 1.0]), *one(D[:2]), 1.0, -1.0, -0.5)
    torch.testing.assert_close(equal, tensor([-1.0, -1.0]))


def test_the_fixed_null_shrinks_the_mass_of_the_tail() -> None:
    logits = tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tail = logits.detach().softmax(0) < 0.1
    mass = logits.softmax(0)[tail].sum()
    assert mass.item() == pytest.approx(0.1294697, abs=1e-6)
    (exact,) = torch.autograd.grad(0.5 * mass, logits)
    logp = logits.log_softmax(0)
    expected = (logits.detach().softmax(0) * torch.where(tail, 0.5, 0.0) * logp).sum()
    (found,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(
        exact,
        tensor([-0.0411978, -0.0151558, 0.0374888, 0.0137913, 0.0050736], dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )


def test_tide_punishes_and_injects_where_the_released_code_does() -> None:
    student, teacher = tensor([-0.1, -0.5, -0.9, -1.4, -0.3]), tensor([-0.2, -3.0, -0.5, -1.5, -6.0])
    found = excess(teacher - student, *one(student), 0.4)
    torch.testing.assert_close(found, tensor([0.0, -1.4269904, 0.0, 0.0, -1.8843113]))
    missing = tensor([0.1756680, 1.0688176, 0.1769811, 1.0920838, 3.1402285])
    assert worst(missing, *one(missing), 0.4).tolist() == [False, False, False, True, True]
    assert not excess(tensor([0.1, 0.2]), *one(D[:2]), 0.5).any()
    assert not worst(missing, *one(missing), 0.0).any()
