"""Checks that look at bits agree with arithmetic, bit for bit."""

import numpy as np

from opd.wire.checks import finite_bf16
from opd.wire.tensors import bf16_to_f32


def test_every_bfloat16_is_told_finite_or_not() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(bf16_to_f32(bits))
    assert [finite_bf16(bits[n : n + 1]) for n in range(1 << 16)] == finite.tolist()
    assert finite_bf16(bits[finite].reshape(2, -1))
    for bad in bits[~finite]:
        assert not finite_bf16(np.append(bits[finite], bad))
