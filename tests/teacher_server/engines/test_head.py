"""Heads as Describe names them and callers receive them."""

import numpy as np
import pytest
import torch

from opd.heads import OutputHead
from opd.wire.fingerprint import head_hash
from teacher_server.engines.head import export, identity_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_are_in_no_logits_and_in_no_exported_head(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((30, 6), (30,), (4, 6)))
    padded, cut = OutputHead(weight, bias, 0.5, 2.0, padding=7), OutputHead(weight[:23], bias[:23], 0.5, 2.0)
    assert padded.vocab_size == 23
    torch.testing.assert_close(padded.logits(hidden), cut.logits(hidden))
    assert identity_of(padded) == identity_of(cut)
    assert export(padded, "").weight.shape == (23, 6) and export(padded, "").bias.shape == (23,)


@pytest.mark.parametrize(
    ("dtype", "array", "name"),
    [(torch.float32, np.float32, "f32"), (torch.bfloat16, np.uint16, "bf16"), (torch.float16, np.float16, "f16")],
)
def test_export_keeps_the_bits_and_hashes_by_content(dtype: torch.dtype, array: type, name: str) -> None:
    weight = torch.randn(5, 3).to(dtype)
    head = export(OutputHead(weight, torch.zeros(5, dtype=dtype), 2.0, 0.0), "")
    assert head.weight.dtype == array and head.dtype == name and head.bias is not None
    restored = torch.from_numpy(head.weight)
    assert torch.equal(restored.view(dtype) if name == "bf16" else restored, weight)
    assert head_hash(head) != head_hash(export(OutputHead(weight, None, 2.0, 0.0), ""))
