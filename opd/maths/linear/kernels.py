"""Triton kernels for a tile of logits [n, V] on CUDA: row statistics, and the gradient in place.

They mirror `opd.maths.rows` and `opd.maths.pointwise`, which define what is computed and serve as reference in the
tests. Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1). The statistics take one program per row,
which sweeps the vocabulary twice; the gradient is one element-wise pass. float32 only.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from opd.maths.pointwise import Kind, Spec, logit
from opd.maths.rows import Statistic

_BLOCK = 2048
# Compile-time codes of the divergences, in the order of the enumeration.
_CODES = {kind: code for code, kind in enumerate(Kind)}
_FORWARD = tl.constexpr(_CODES[Kind.FORWARD_KL])
_REVERSE = tl.constexpr(_CODES[Kind.REVERSE_KL])
_JSD = tl.constexpr(_CODES[Kind.JSD])
_SKEW_FORWARD = tl.constexpr(_CODES[Kind.SKEW_FORWARD_KL])
_SKEW_REVERSE = tl.constexpr(_CODES[Kind.SKEW_REVERSE_KL])
_OUR_LOG_Z, _THEIR_LOG_Z, _VALUE, _OUR_ENTROPY, _THEIR_ENTROPY = (tl.constexpr(row.value) for row in Statistic)
# Columns that the gradient needs, after those of `Statistic`: the largest logit of either side, the logarithm of the
# sum of e^(logit - largest) of either side, the tilt of the student's most likely entry, and the sum of the slopes.
_OUR_MAX, _OUR_LOG_SUM, _THEIR_MAX, _THEIR_LOG_SUM, _CENTRE, _SLOPES = (
    tl.constexpr(len(Statistic) + i) for i in range(6)
)
_COLUMNS = tl.constexpr(len(Statistic) + 6)


def fold_(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    spec: Spec,
    temperature: float,
    *,
    soft_cap: float = 0.0,
    factor: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "5 n"]:
    """`opd.maths.rows.fold_rows_` for a whole tile, except that `teacher` is left as it is."""
    rows, vocabulary = student.shape
    figures = torch.empty(rows, _COLUMNS.value, dtype=torch.float32, device=student.device)
    strides = student.stride(0), teacher.stride(0)
    # The logit of the other side's share in the mixture, which is w in jsd and 1 - w in either skewed KL.
    odds = 0.0 if not spec.weight else logit(spec.weight) if spec.kind is Kind.JSD else -logit(spec.weight)
    numbers = 1.0 / temperature, spec.weight, 1.0 - spec.weight, odds
    constants = {"VOCABULARY": vocabulary, "KIND": _CODES[spec.kind], "BLOCK": _BLOCK, "num_warps": 8}
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(student):
        _statistics_kernel[(rows,)](student, teacher, figures, *strides, *numbers, **constants)
        if factor is not None:
            _gradient_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
                student,
                teacher,
                figures,
                # Indexed by the row alone, without a stride.
                factor.contiguous(),
                *strides,
                *numbers,
                # A placeholder where HAS_SOFT_CAP is False; the kernel does not read it then.
                soft_cap or 1.0,
                HAS_SOFT_CAP=soft_cap > 0,
                **constants,
            )
    return figures[:, : len(Statistic)].t()


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x):  # type: ignore[no-untyped-def]
    # log(1 + e^x), with log1p by Kahan's correction: Triton's interpreter has no libdevice.
    small = tl.exp(-tl.abs(x))
    shifted = 1.0 + small
    gap = shifted - 1.0
    return tl.maximum(x, 0.0) + tl.where(gap == 0.0, small, tl.log(shifted) * (small / tl.where(gap == 0.0, 1.0, gap)))


@triton.jit  # type: ignore[untyped-decorator]
def _term_and_tilt(log_p, log_q, weight, complement, odds, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    # Mirrors opd.maths.pointwise.term_and_slope; the slope is p * (tilt - tilt of the most likely entry). `odds` is the
    # logit of the other side's share in the mixture.
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if KIND == _FORWARD:
        term = tl.where(q > 0, q * (log_q - log_p), 0.0)
        tilt = tl.zeros_like(p)
    elif KIND == _REVERSE:
        tilt = log_p - log_q
        term = tl.where(p > 0, p * tilt, 0.0)
    elif KIND == _JSD:
        # log m = log p + softplus(x) - softplus(odds) for the mixture m: probabilities are not added, so none
        # underflows.
        x = log_q - log_p + odds
        p_under_m = _softplus(x)
        ours = tl.where(p > 0, p * (_softplus(odds) - p_under_m), 0.0)
        theirs = tl.where(q > 0, q * (_softplus(-odds) - _softplus(-x)), 0.0)
        term = weight * theirs + complement * ours
        tilt = -complement * p_under_m
    elif KIND == _SKEW_FORWARD:
        # log m - log q, in the same way.
        log_ratio = _softplus(log_p - log_q + odds) - _softplus(odds)
        term = tl.where(q > 0, -q * log_ratio, 0.0)
        tilt = -complement * tl.exp(-log_ratio)
    elif KIND == _SKEW_REVERSE:
        x = log_q - log_p + odds
        p_under_m = _softplus(x)
        term = tl.where(p > 0, p * (_softplus(odds) - p_under_m), 0.0)
        tilt = tl.sigmoid(x) - p_under_m
    else:
        gap = p - q
        term = 0.5 * tl.abs(gap)
        tilt = tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, 0.0))
    return term, tilt


@triton.jit  # type: ignore[untyped-decorator]
def _slope(log_p, log_q, tilt, centre, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == _FORWARD:
        slope = -tl.exp(log_q)
    else:
        p = tl.exp(log_p)
        slope = tl.where(p > 0, p * (tilt - centre), 0.0)
    return slope


@triton.jit  # type: ignore[untyped-decorator]
def _fold(running_max, running_sum, values, inverse_temperature):  # type: ignore[no-untyped-def]
    # Online logsumexp of values / temperature. A block of only -inf leaves the sum as it is.
    new_max = tl.maximum(running_max, tl.max(values, axis=0))
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    kept = running_sum * tl.exp((running_max - anchor) * inverse_temperature)
    return new_max, kept + tl.sum(tl.exp((values - anchor) * inverse_temperature), axis=0)


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
    odds,
    VOCABULARY: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: with a large scratch, row * stride exceeds 2^31.
    row = tl.program_id(0).to(tl.int64)
    ours, theirs = student + row * student_stride, teacher + row * teacher_stride
    our_max, our_sum = float("-inf"), 0.0
    their_max, their_sum = float("-inf"), 0.0
    at_our_max = float("-inf")  # the teacher's logit where the student's is largest
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < VOCABULARY
        zs = tl.load(ours + at, mask=inside, other=float("-inf"))
        zt = tl.load(theirs + at, mask=inside, other=float("-inf"))
        highest = tl.max(zs, axis=0)
        at_highest = tl.max(tl.where(zs == highest, zt, float("-inf")), axis=0)
        at_our_max = tl.where(highest > our_max, at_highest, at_our_max)
        our_max, our_sum = _fold(our_max, our_sum, zs, inverse_temperature)
        their_max, their_sum = _fold(their_max, their_sum, zt, inverse_temperature)
    our_log_sum, their_log_sum = tl.log(our_sum), tl.log(their_sum)
    # Difference of logits first, temperature after: exactly 0 at the largest logit, however operations are fused.
    top_log_q = (at_our_max - their_max) * inverse_temperature - their_log_sum
    _, centre = _term_and_tilt(-our_log_sum, top_log_q, weight, complement, odds, KIND)

    value, slopes, our_entropy, their_entropy = 0.0, 0.0, 0.0, 0.0
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < VOCABULARY
        zs = tl.load(ours + at, mask=inside, other=float("-inf"))
        zt = tl.load(theirs + at, mask=inside, other=float("-inf"))
        log_p = (zs - our_max) * inverse_temperature - our_log_sum
        log_q = (zt - their_max) * inverse_temperature - their_log_sum
        term, tilt = _term_and_tilt(log_p, log_q, weight, complement, odds, KIND)
        value += tl.sum(tl.where(inside, term, 0.0), axis=0)
        slopes += tl.sum(tl.where(inside, _slope(log_p, log_q, tilt, centre, KIND), 0.0), axis=0)
        # An excluded id would contribute 0 * -inf, which is NaN.
        our_entropy -= tl.sum(tl.where(log_p > -1e30, tl.exp(log_p) * log_p, 0.0), axis=0)
        their_entropy -= tl.sum(tl.where(log_q > -1e30, tl.exp(log_q) * log_q, 0.0), axis=0)
    out += row * _COLUMNS
    tl.store(out + _OUR_LOG_Z, our_max * inverse_temperature + our_log_sum)
    tl.store(out + _THEIR_LOG_Z, their_max * inverse_temperature + their_log_sum)
    tl.store(out + _VALUE, value)
    tl.store(out + _OUR_ENTROPY, our_entropy)
    tl.store(out + _THEIR_ENTROPY, their_entropy)
    tl.store(out + _OUR_MAX, our_max)
    tl.store(out + _OUR_LOG_SUM, our_log_sum)
    tl.store(out + _THEIR_MAX, their_max)
    tl.store(out + _THEIR_LOG_SUM, their_log_sum)
    tl.store(out + _CENTRE, centre)
    tl.store(out + _SLOPES, slopes)


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
    odds,
    soft_cap,
    VOCABULARY: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCABULARY
    ours = student + row * student_stride + at
    figures += row * _COLUMNS
    logits = tl.load(ours, mask=inside, other=float("-inf"))
    target = tl.load(teacher + row * teacher_stride + at, mask=inside, other=float("-inf"))
    # In the same order of operations as the statistics, so that both kernels see the same probabilities.
    log_p = (logits - tl.load(figures + _OUR_MAX)) * inverse_temperature - tl.load(figures + _OUR_LOG_SUM)
    log_q = (target - tl.load(figures + _THEIR_MAX)) * inverse_temperature - tl.load(figures + _THEIR_LOG_SUM)
    _, tilt = _term_and_tilt(log_p, log_q, weight, complement, odds, KIND)
    slope = _slope(log_p, log_q, tilt, tl.load(figures + _CENTRE), KIND)
    # Through the softmax: d logit_i = slope_i - p_i * (sum of all slopes).
    gradient = slope - tl.exp(log_p) * tl.load(figures + _SLOPES)
    if HAS_SOFT_CAP:
        # tanh' = 1 - tanh^2, from the capped logits: the uncapped ones were overwritten.
        capped = logits / soft_cap
        gradient *= 1.0 - capped * capped
    tl.store(ours, gradient * tl.load(factor + row), mask=inside)
