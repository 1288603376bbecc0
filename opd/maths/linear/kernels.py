"""Triton kernels for a tile of logits [n, V] on CUDA: row statistics and the gradient, in place.

They mirror `opd.maths.rows` and `opd.maths.pointwise`, which are the definition and the reference of their tests; where
there is no GPU they run under Triton's interpreter (TRITON_INTERPRET=1). One program per row sweeps the vocabulary
twice for the statistics; the gradient is one element-wise pass. float32 only.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from opd.maths.pointwise import Kind, Spec, is_moderate
from opd.maths.rows import Row

_BLOCK = 2048
# Compile-time codes of the kinds, in the order of the enumeration.
_CODES = {kind: code for code, kind in enumerate(Kind)}
_FORWARD = tl.constexpr(_CODES[Kind.FORWARD_KL])
_REVERSE = tl.constexpr(_CODES[Kind.REVERSE_KL])
_JSD = tl.constexpr(_CODES[Kind.JSD])
_SKEW_FORWARD = tl.constexpr(_CODES[Kind.SKEW_FORWARD_KL])
_SKEW_REVERSE = tl.constexpr(_CODES[Kind.SKEW_REVERSE_KL])


def fold_(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    spec: Spec,
    temperature: float,
    *,
    soft_cap: float = 0.0,
    factor: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "6 n"]:
    """`opd.maths.rows.fold_rows_` for a whole tile, but for leaving `teacher` as it is."""
    rows, vocabulary = student.shape
    figures = torch.empty(rows, len(Row), dtype=torch.float32, device=student.device)
    strides = student.stride(0), teacher.stride(0)
    numbers = 1.0 / temperature, spec.weight, 1.0 - spec.weight
    constants = {
        "VOCABULARY": vocabulary,
        "KIND": _CODES[spec.kind],
        "MODERATE": is_moderate(spec.weight),
        "BLOCK": _BLOCK,
        "num_warps": 8,
    }
    _statistics_kernel[(rows,)](student, teacher, figures, *strides, *numbers, **constants)
    if factor is not None:
        _gradient_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            student,
            teacher,
            figures,
            factor.contiguous(),
            *strides,
            *numbers,
            soft_cap or 1.0,
            HAS_SOFT_CAP=soft_cap > 0,
            **constants,
        )
    return figures.t()


@triton.jit  # type: ignore[untyped-decorator]
def _log_mix_ratio(weight, complement, log_ratio):  # type: ignore[no-untyped-def]
    # log(c + w e^r) with c = 1 - w. log1p and expm1 by Kahan's corrections: the interpreter knows no libdevice.
    bounded = tl.minimum(log_ratio, 20.0)
    grown = tl.exp(bounded)
    log_grown = tl.log(tl.maximum(grown, 0.5))
    corrected = (grown - 1.0) * bounded / tl.where(log_grown == 0.0, 1.0, log_grown)
    expm1 = tl.where(log_grown == 0.0, bounded, corrected)
    x = weight * tl.where(bounded < -0.5, grown - 1.0, expm1)
    shifted = 1.0 + x
    gap = shifted - 1.0
    log1p = tl.where(gap == 0.0, x, tl.log(shifted) * (x / tl.where(gap == 0.0, 1.0, gap)))
    rest = complement / weight * tl.exp(-tl.maximum(log_ratio, 20.0))
    return tl.where(log_ratio > 20.0, log_ratio + tl.log(weight) + tl.log(1.0 + rest), log1p)


@triton.jit  # type: ignore[untyped-decorator]
def _term_and_slope(  # type: ignore[no-untyped-def]
    log_p, log_q, weight, complement, KIND: tl.constexpr, MODERATE: tl.constexpr
):
    # Mirrors opd.maths.pointwise.term_and_slope.
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if KIND == _FORWARD:
        term = tl.where(q > 0, q * (log_q - log_p), 0.0)
        slope = -q
    elif KIND == _REVERSE:
        term = tl.where(p > 0, p * (log_p - log_q), 0.0)
        slope = term
    elif KIND == _JSD and MODERATE:
        log_m = tl.log(weight * q + complement * p)
        ours = tl.where(p > 0, p * (log_p - log_m), 0.0)
        theirs = tl.where(q > 0, q * (log_q - log_m), 0.0)
        term = weight * theirs + complement * ours
        slope = complement * ours
    elif KIND == _JSD:
        ours = tl.where(p > 0, -p * _log_mix_ratio(weight, complement, log_q - log_p), 0.0)
        theirs = tl.where(q > 0, -q * _log_mix_ratio(complement, weight, log_p - log_q), 0.0)
        term = weight * theirs + complement * ours
        slope = complement * ours
    elif KIND == _SKEW_FORWARD:
        log_ratio = _log_mix_ratio(complement, weight, log_p - log_q)
        term = tl.where(q > 0, -q * log_ratio, 0.0)
        slope = tl.where(q > 0, -complement * p * tl.exp(-log_ratio), 0.0)
    elif KIND == _SKEW_REVERSE:
        log_ratio = _log_mix_ratio(complement, weight, log_q - log_p)
        term = tl.where(p > 0, -p * log_ratio, 0.0)
        slope = term - tl.where(p > 0, weight * p * tl.exp(-log_ratio), 0.0)
    else:
        gap = p - q
        term = 0.5 * tl.abs(gap)
        slope = 0.5 * p * tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
    return term, slope


@triton.jit  # type: ignore[untyped-decorator]
def _fold(running_max, running_sum, values):  # type: ignore[no-untyped-def]
    # Online logsumexp. A block of -inf only leaves the sum as it is.
    new_max = tl.maximum(running_max, tl.max(values, axis=0))
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, running_sum * tl.exp(running_max - anchor) + tl.sum(tl.exp(values - anchor), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    student,
    teacher,
    out,
    student_stride,
    teacher_stride,
    inverse_temperature,
    weight,
    complement,
    VOCABULARY: tl.constexpr,
    KIND: tl.constexpr,
    MODERATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ours, theirs = student + row * student_stride, teacher + row * teacher_stride
    our_max, our_sum = float("-inf"), 0.0
    their_max, their_sum = float("-inf"), 0.0
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < VOCABULARY
        zs = tl.load(ours + at, mask=inside, other=float("-inf")) * inverse_temperature
        zt = tl.load(theirs + at, mask=inside, other=float("-inf")) * inverse_temperature
        our_max, our_sum = _fold(our_max, our_sum, zs)
        their_max, their_sum = _fold(their_max, their_sum, zt)
    our_log_z = our_max + tl.log(our_sum)
    their_log_z = their_max + tl.log(their_sum)

    value, slopes, our_entropy, their_entropy = 0.0, 0.0, 0.0, 0.0
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < VOCABULARY
        log_p = tl.load(ours + at, mask=inside, other=float("-inf")) * inverse_temperature - our_log_z
        log_q = tl.load(theirs + at, mask=inside, other=float("-inf")) * inverse_temperature - their_log_z
        term, slope = _term_and_slope(log_p, log_q, weight, complement, KIND, MODERATE)
        value += tl.sum(tl.where(inside, term, 0.0), axis=0)
        slopes += tl.sum(tl.where(inside, slope, 0.0), axis=0)
        our_entropy -= tl.sum(tl.where(log_p > -1e30, tl.exp(log_p) * log_p, 0.0), axis=0)
        their_entropy -= tl.sum(tl.where(log_q > -1e30, tl.exp(log_q) * log_q, 0.0), axis=0)
    out += row * 6
    tl.store(out + 0, our_log_z)
    tl.store(out + 1, their_log_z)
    tl.store(out + 2, value)
    tl.store(out + 3, slopes)
    tl.store(out + 4, our_entropy)
    tl.store(out + 5, their_entropy)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    student,
    teacher,
    figures,
    factor,
    student_stride,
    teacher_stride,
    inverse_temperature,
    weight,
    complement,
    soft_cap,
    VOCABULARY: tl.constexpr,
    KIND: tl.constexpr,
    MODERATE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCABULARY
    ours = student + row * student_stride + at
    our_log_z = tl.load(figures + row * 6)
    their_log_z = tl.load(figures + row * 6 + 1)
    slopes = tl.load(figures + row * 6 + 3)
    logits = tl.load(ours, mask=inside, other=float("-inf"))
    target = tl.load(teacher + row * teacher_stride + at, mask=inside, other=float("-inf"))
    log_p = logits * inverse_temperature - our_log_z
    log_q = target * inverse_temperature - their_log_z
    _, slope = _term_and_slope(log_p, log_q, weight, complement, KIND, MODERATE)
    gradient = slope - tl.exp(log_p) * slopes
    if HAS_SOFT_CAP:
        capped = logits / soft_cap
        gradient *= 1.0 - capped * capped
    tl.store(ours, gradient * tl.load(factor + row), mask=inside)
