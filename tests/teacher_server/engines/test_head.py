"""Heads: scale and soft-cap by family, half precision, export."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opd.heads import scale_and_cap
from opd.wire.fingerprint import head_hash
from teacher_server.engines.head import OutputHead


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3"}, (1.0, 0.0)),
        ({"model_type": "granite", "logits_scaling": 8.0}, (0.125, 0.0)),
        ({"model_type": "hyperclovax", "logits_scaling": 0.5}, (0.5, 0.0)),
        ({"model_type": "cohere2", "logit_scale": 0.0625}, (0.0625, 0.0)),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.04}, (0.04, 0.0)),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, (1.0, 30.0)),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_are_in_no_logits_and_in_no_exported_head(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((30, 6), (30,), (4, 6)))
    padded, cut = OutputHead(weight, bias, 0.5, 2.0, padding=7), OutputHead(weight[:23], bias[:23], 0.5, 2.0)
    assert padded.vocab_size == 23
    torch.testing.assert_close(padded.logits(hidden), cut.logits(hidden))
    assert padded.identity() == cut.identity()
    assert padded.export("").weight.shape == (23, 6) and padded.export("").bias.shape == (23,)


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


@pytest.mark.parametrize(
    ("dtype", "array", "name"),
    [(torch.float32, np.float32, "f32"), (torch.bfloat16, np.uint16, "bf16"), (torch.float16, np.float16, "f16")],
)
def test_export_keeps_the_bits_and_hashes_by_content(dtype: torch.dtype, array: type, name: str) -> None:
    weight = torch.randn(5, 3).to(dtype)
    head = OutputHead(weight, torch.zeros(5, dtype=dtype), 2.0, 0.0).export("")
    assert head.weight.dtype == array and head.dtype == name and head.bias is not None
    restored = torch.from_numpy(head.weight)
    assert torch.equal(restored.view(dtype) if name == "bf16" else restored, weight)
    assert head_hash(head) != head_hash(OutputHead(weight, None, 2.0, 0.0).export(""))
