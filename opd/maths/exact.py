"""Exact divergences between two sets of logits, with analytic gradients.

    from opd.maths import forward_kl, reverse_kl, jsd
    loss = reverse_kl(student_logits, teacher_logits, mask=mask).mean

The name gives the direction: `forward_kl` is KL(teacher || student), `reverse_kl` is KL(student || teacher). Values are
in nats, between the tempered distributions softmax(logits / temperature); no factor temperature**2 is applied. The
teacher gets no gradient. Forward and backward pass work on blocks of rows: beyond the inputs they hold one [N, V]
gradient. For hidden states and a head use `linear_divergence`, which never builds the logits.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.maths.blocks import accumulator_dtype, flat_rows, row_blocks, select_rows
from opd.maths.checks import (
    check_logits,
    check_mask,
    check_rows_finite,
    check_shape,
    check_temperature,
    should_check_values,
)
from opd.maths.pointwise import Kind, Spec, divergence_spec
from opd.maths.result import Divergence, reduced
from opd.maths.rows import Statistic, fold_rows_


def forward_kl(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(teacher || student) per position, mass-covering; its gradient on the student's logits / temperature is p - q.

    p is the student's distribution, q the teacher's.

    Args:
        student_logits: [..., V], any float dtype, carries the gradient. An entry that both sides mask is -inf in both.
        teacher_logits: [..., V], detached.
        temperature: divides both sides' logits, above 0.
        mask: [...] bool, True where a position counts; masked rows may hold NaN and get a zero gradient.
        check_values: whether to refuse rows that are not finite; by default on CPU only, since an accelerator has to be
            waited for.

    Returns:
        Nats per token with their reductions, and the entropies of both models. Infinite where the teacher has mass on
        an entry that the student excludes with -inf.

    Raises:
        ValueError: if a shape, a dtype, the temperature or a row of logits is not valid.
    """
    return _exact(student_logits, teacher_logits, Spec(Kind.FORWARD_KL), temperature, mask, check_values)


def reverse_kl(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(student || teacher) per position, mode-seeking; its gradient is p (log p - log q - KL).

    Arguments, result, errors and notation are those of `forward_kl`. Infinite where the student has mass on an entry
    that the teacher excludes with -inf.
    """
    return _exact(student_logits, teacher_logits, Spec(Kind.REVERSE_KL), temperature, mask, check_values)


def jsd(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    beta: float = 0.5,
    normalised: bool = False,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """Generalised Jensen-Shannon divergence: beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S.

    This is the convention of GKD (arXiv 2306.13649). The value vanishes as beta approaches 0 or 1, so beta also changes
    the scale of the gradient, by orders of magnitude. `normalised` divides by beta (1 - beta); the result is continuous
    on [0, 1], with forward_kl at 0 and reverse_kl at 1 (and four times the JSD at 0.5).

    Args:
        student_logits: as for `forward_kl`.
        teacher_logits: as for `forward_kl`.
        beta: the teacher's share of the mixture, in (0, 1), or in [0, 1] when normalised.
        normalised: divide by beta (1 - beta).
        temperature: as for `forward_kl`.
        mask: as for `forward_kl`.
        check_values: as for `forward_kl`.

    Returns:
        Nats per token; always finite, at most log 2 at beta 0.5 without normalisation.

    Raises:
        ValueError: as for `forward_kl`, and for beta out of range.
    """
    spec = divergence_spec("jsd", weight=beta, normalised=normalised)
    return _exact(student_logits, teacher_logits, spec, temperature, mask, check_values)


def skew_forward_kl(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    alpha: float = 0.1,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(T || alpha T + (1 - alpha) S), bounded by -log alpha (DistiLLM, arXiv 2402.03898); alpha in [0, 1).

    Arguments, result and errors are those of `forward_kl`, to which it reduces at alpha 0.
    """
    spec = divergence_spec("skew_forward_kl", weight=alpha)
    return _exact(student_logits, teacher_logits, spec, temperature, mask, check_values)


def skew_reverse_kl(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    alpha: float = 0.1,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(S || alpha S + (1 - alpha) T), bounded by -log alpha (DistiLLM, arXiv 2402.03898); alpha in [0, 1).

    Arguments, result and errors are those of `forward_kl`; at alpha 0 it is `reverse_kl`.
    """
    spec = divergence_spec("skew_reverse_kl", weight=alpha)
    return _exact(student_logits, teacher_logits, spec, temperature, mask, check_values)


def total_variation(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    *,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """Total variation distance, half the L1 distance of the probabilities, in [0, 1] (a probability, not nats).

    Arguments, result and errors are those of `forward_kl`. Where probabilities are equal the gradient is a subgradient.
    """
    return _exact(student_logits, teacher_logits, Spec(Kind.TOTAL_VARIATION), temperature, mask, check_values)


def _exact(
    student: Tensor, teacher: Tensor, spec: Spec, temperature: float, mask: Tensor | None, check_values: bool | None
) -> Divergence:
    check_logits("student_logits", student)
    check_logits("teacher_logits", teacher)
    check_shape("teacher_logits", teacher, tuple(student.shape), "student_logits")
    check_temperature(temperature)
    leading = tuple(student.shape[:-1])
    check_mask("mask", mask, leading, "the leading axes of student_logits")
    flat_mask = None if mask is None else mask.reshape(-1)
    rows, targets = flat_rows(student), flat_rows(teacher.detach())
    check = should_check_values(student, check_values)
    outputs = _LogitDivergence.apply(rows, targets, flat_mask, spec, temperature, check)
    per_token, student_entropy, teacher_entropy = (out.reshape(leading) for out in outputs)
    return reduced(per_token, mask, student_entropy=student_entropy, teacher_entropy=teacher_entropy)


class _LogitDivergence(torch.autograd.Function):
    """Value and entropies per row. The backward pass recomputes the softmax from the logits, block by block."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor | None, spec: Spec, temperature: float, check: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulator_dtype(student, teacher)
        stats = torch.empty(len(Statistic), student.shape[0], dtype=dtype, device=student.device)
        for block in row_blocks(student):
            # Copied even if the dtype is the same: `fold_rows_` overwrites both.
            ours, theirs = (logits[block].to(dtype, copy=True) for logits in (student, teacher))
            stats[:, block] = fold_rows_(ours, theirs, spec, temperature)
        if check:
            check_rows_finite("student_logits", student, stats[Statistic.STUDENT_LOG_Z], mask)
            check_rows_finite("teacher_logits", teacher, stats[Statistic.TEACHER_LOG_Z], mask)
        if mask is not None:
            stats = torch.where(mask, stats, torch.zeros_like(stats))
        # Only the logits, which exist anyway: keeping probabilities would add [N, V] tensors to the step's peak memory.
        ctx.save_for_backward(student, teacher, mask)
        ctx.spec, ctx.temperature = spec, temperature
        entropies = stats[Statistic.STUDENT_ENTROPY], stats[Statistic.TEACHER_ENTROPY]
        ctx.mark_non_differentiable(*entropies)
        return stats[Statistic.VALUE] * spec.scale, *entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, mask = ctx.saved_tensors
        out = torch.empty_like(student)
        # All that is constant in a row goes into one factor, applied in a sweep that `fold_rows_` makes anyway.
        factor = grad * (ctx.spec.scale / ctx.temperature)
        for block in row_blocks(student):
            ours, theirs = (logits[block].to(grad.dtype, copy=True) for logits in (student, teacher))
            fold_rows_(ours, theirs, ctx.spec, ctx.temperature, factor=factor[block])
            chosen = select_rows(mask, block)
            # `where`, not a product: masked rows may hold NaN.
            out[block] = ours if chosen is None else torch.where(chosen, ours, torch.zeros_like(ours))
        return out, None, None, None, None, None
