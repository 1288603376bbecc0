"""Output heads: the formula, half precision, padding rows, scale and soft-cap by family."""

from types import SimpleNamespace

import pytest
import torch

from opd.heads import OutputHead, scale_and_cap


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3"}, (1.0, 0.0)),
        ({"model_type": "granite", "logits_scaling": 8.0}, (0.125, 0.0)),
        ({"model_type": "hyperclovax", "logits_scaling": 0.5}, (0.5, 0.0)),
        ({"model_type": "cohere2", "logit_scale": 0.0625}, (0.0625, 0.0)),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.04}, (0.04, 0.0)),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ({"model_type": "inkling_text", "logits_mup_width_multiplier": 8.0}, (0.125, 0.0)),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30.0}, (1.0, 30.0)),
        ({"model_type": "xlstm", "output_logit_soft_cap": 15.0}, (1.0, 15.0)),
        ({"model_type": "gemma3_text", "final_logit_softcapping": None}, (1.0, 0.0)),
    ],
)
def test_scale_and_soft_cap_come_from_the_config(config: dict[str, object], expected: tuple[float, float]) -> None:
    assert scale_and_cap(SimpleNamespace(**config)) == expected


def test_logits_follow_the_formula_with_bias_scale_and_soft_cap() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*shape, generator=draw) for shape in ((30, 6), (30,), (4, 6)))
    found = OutputHead(weight, bias, 0.5, 2.0).logits(hidden)
    torch.testing.assert_close(found, 2.0 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 2.0))


def test_a_bf16_head_is_not_rounded_to_bf16() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((40_000, 16), (3, 16)))
    found = OutputHead(weight, None, 1.0, 0.0).logits(hidden)
    exact = hidden.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-5
    assert ((hidden @ weight.T).double() - exact).abs().max() > 1e-3


def test_a_bf16_head_gives_f32_logits_while_another_thread_loads_a_bf16_model() -> None:
    weight, hidden = torch.randn(50, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    head = OutputHead(weight, None, 1.0, 0.0)
    calm = head.logits(hidden)
    torch.set_default_dtype(torch.bfloat16)  # what loading sets, for all threads
    try:
        found = head.logits(hidden)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, calm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_the_same_in_a_buffer_of_the_caller(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((30, 6), (30,), (4, 6)))
    head = OutputHead(weight, bias, 0.5, 2.0, padding=7)
    buffer = torch.full((4, 32), torch.nan, dtype=head.dtype)
    assert head.logits(hidden, buffer[:, :23]).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:, :23], head.logits(hidden)) and buffer[:, 23:].isnan().all()
    assert head.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_gradient_goes_back_through_the_soft_cap() -> None:
    weight, hidden = torch.randn(9, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    head = OutputHead(weight, soft_cap=1.5)
    leaf = (hidden @ weight.T).requires_grad_()
    capped = 1.5 * torch.tanh(leaf / 1.5)
    upstream = torch.randn(3, 9, dtype=torch.float64)
    (want,) = torch.autograd.grad(capped, leaf, upstream)
    head.through_cap_(upstream, head.logits(hidden))
    torch.testing.assert_close(upstream, want)
