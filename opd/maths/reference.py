"""Targets of G-OPD and ExOPD, adjusted by a reference: T^power R^(1 - power), normalised (arXiv 2602.12125).

Power 0 gives the reference R and 1 the teacher T, so plain distillation. Between them the target interpolates
log-linearly; above 1 it extrapolates away from the reference: log T + (power - 1) (log T - log R).

What is exact for each payload:

    logits        `adjusted_logits`, then any exact divergence: everything exact.
    hidden        `linear_divergence(reference=...)`: everything exact.
    sampled       `adjusted_log_probs`, then `sampled_reverse_kl`: the reverse KL's gradient is unbiased, because the
                  missing normaliser Z does not depend on the sampled token; values are off by log Z.
    topk, gather  `adjusted_payload`, then `head_tail_reverse_kl`: the gradient is unbiased for the same reason; values
                  are off by log Z minus its estimate. `topk_divergence` on it (forward KL, JSD) has the bias of the
                  tail
                  bucket plus that of the estimated tail, which is zero if T / R is constant on the tail.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.checks import check_last_axis, check_shape, describe


@dataclass(frozen=True, slots=True, eq=False)
class AdjustedPayload:
    """The target T^power R^(1 - power) on part of the vocabulary, as arguments for `head_tail_reverse_kl`.

    Attributes:
        teacher_log_probs: [..., K] at the candidates.
        teacher_sampled: [...] at the sampled token.
        teacher_log_tail: [...] outside the candidates; an estimate, see `adjusted_payload`.
        log_z: [...] the estimated log-normaliser that was subtracted from the other three, in nats.
    """

    teacher_log_probs: Float[Tensor, "*N K"]
    teacher_sampled: Float[Tensor, "*N"]
    teacher_log_tail: Float[Tensor, "*N"]
    log_z: Float[Tensor, "*N"]


def adjusted_log_probs(
    teacher: Float[Tensor, "*S"], reference: Float[Tensor, "*S"], power: float, *, clip: float | None = None
) -> Float[Tensor, "*S"]:
    """The unnormalised target log T + (power - 1) (log T - log R), entry by entry.

    Args:
        teacher: log-probs at any ids.
        reference: log-probs at the same ids.
        power: lambda of G-OPD, at least 0.
        clip: bound on |log T - log R| in nats, before it is multiplied: guards against the few tokens that dominate at
            power > 1. It is not in the paper, and changes the target where it takes effect.

    Returns:
        Log-weights in nats, which may exceed 0; -inf where either side is. Values are not checked, since masked
        positions may hold anything: the estimator that takes the result refuses NaN at the positions that its mask
        counts.

    Raises:
        ValueError: if shapes differ, dtypes are not floating point, the power is negative or infinite, or clip is not
            above 0.
    """
    if not 0 <= power < math.inf:
        raise ValueError(f"power must be at least 0 and finite, but is {power!r}.")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0 or None, but is {clip!r}.")
    for name, values in (("teacher", teacher), ("reference", reference)):
        if not values.is_floating_point():
            raise ValueError(f"{describe(name, values)} must be floating point; cast it with .float().")
    check_shape("reference", reference, tuple(teacher.shape), "teacher")
    # R^0 is 1, even where the reference excludes an id that the teacher does not.
    if power == 1:
        return teacher
    gap = teacher - reference
    if clip is not None:
        gap = gap.clamp(min=-clip, max=clip)
    # An id that either side excludes is excluded: above power 1, T^power / 0 would be infinite, and -inf - -inf is NaN.
    excluded = teacher.isneginf() | reference.isneginf()
    return torch.where(excluded, -torch.inf, teacher + (power - 1.0) * gap)


def adjusted_logits(
    teacher_logits: Float[Tensor, "*N V"], reference_logits: Float[Tensor, "*N V"], power: float
) -> Float[Tensor, "*N V"]:
    """Logits whose softmax is T^power R^(1 - power), normalised; holds at any temperature that divides both.

    Args:
        teacher_logits: [..., V].
        reference_logits: [..., V].
        power: lambda of G-OPD, at least 0.

    Returns:
        [..., V]; -inf where either side excludes an entry.

    Raises:
        ValueError: if shapes differ, dtypes are not floating point, or the power is negative or infinite.
    """
    return adjusted_log_probs(teacher_logits, reference_logits, power)


def adjusted_payload(
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_sampled: Float[Tensor, "*N"],
    teacher_log_tail: Float[Tensor, "*N"],
    reference_log_probs: Float[Tensor, "*N K"],
    reference_sampled: Float[Tensor, "*N"],
    reference_log_tail: Float[Tensor, "*N"],
    power: float,
    *,
    clip: float | None = None,
) -> AdjustedPayload:
    """The target on K candidates, the sampled token and the tail, from both models' payloads at the same ids.

    The tail's weight, the sum over the tail of T^power R^(1 - power), is not on the wire. It is estimated by the same
    product of the tail masses. By Hoelder's inequality this is an upper bound for power in [0, 1] and a lower bound for
    power above 1, with equality if T / R is constant on the tail. All three outputs are divided by the resulting
    estimate of Z, so they form a distribution over K + 1 buckets.

    Args:
        teacher_log_probs: [..., K].
        teacher_sampled: [...].
        teacher_log_tail: [...].
        reference_log_probs: [..., K] at the same candidates.
        reference_sampled: [...].
        reference_log_tail: [...].
        power: lambda of G-OPD, at least 0.
        clip: as in `adjusted_log_probs`.

    Raises:
        ValueError: if shapes differ, dtypes are not floating point, the power is negative or infinite, or clip is not
            above 0.
    """
    leading = tuple(teacher_sampled.shape)
    check_last_axis("teacher_log_probs", teacher_log_probs, leading, "teacher_sampled")
    check_shape("teacher_log_tail", teacher_log_tail, leading, "teacher_sampled")
    check_shape("reference_log_probs", reference_log_probs, tuple(teacher_log_probs.shape), "teacher_log_probs")
    check_shape("reference_sampled", reference_sampled, leading, "teacher_sampled")
    check_shape("reference_log_tail", reference_log_tail, leading, "teacher_sampled")
    head = adjusted_log_probs(teacher_log_probs, reference_log_probs, power, clip=clip)
    sampled = adjusted_log_probs(teacher_sampled, reference_sampled, power, clip=clip)
    tail = adjusted_log_probs(teacher_log_tail, reference_log_tail, power, clip=clip)
    log_z = torch.cat([head, tail.unsqueeze(-1)], dim=-1).logsumexp(-1)
    return AdjustedPayload(head - log_z.unsqueeze(-1), sampled - log_z, tail - log_z, log_z)
