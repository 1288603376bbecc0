"""Reverse KL from part of the teacher's distribution: an exact head plus one sampled token for the tail. The default.

    ids = student_logits.topk(64).indices                       # chosen without looking at the sampled token
    loss = head_tail_reverse_kl(student_logits, y, ids, teacher_log_probs, teacher_sampled, teacher_log_tail).mean

Write S for the candidates, p for the student, q for the teacher, r = log p - log q, y ~ p for the sampled token. The
gradient of KL(p || q) is sum_i p_i r_i grad log p_i. The head, i in S, is summed exactly with detached weights; the
tail, i not in S, is estimated by the one token that was drawn anyway:

    sum_S sg(p_i (r_i - b)) log p_i  +  sg(p_tail (c - b)) log p_tail  +  1[y not in S] sg(w (r_y - c)) log p_y

Any b and c that do not depend on y leave the expectation unchanged, for every K from 0 to V, so the choice is variance
only: `tail_mean` takes c = log p_tail - log q_tail + KL of the head's conditionals, an estimate of the tail's mean r;
`head_kl` takes b = c = sum_S p r; `none` takes 0. Measured in docs/estimators.md. Differentiating sum_S p r itself
would add grad p(S), which drains the head (the "+1" bias, arXiv 2605.11182).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_log_probs, check_mask, check_shape, check_temperature
from opd.maths.diagnostics import head_and_tail_masses
from opd.maths.result import Divergence, reduced
from opd.maths.scores import TokenScores, score_tokens

#: Choices of the tail's baseline.
BASELINES = ("tail_mean", "head_kl", "none")


def head_tail_reverse_kl(
    student: Float[Tensor, "*N V"] | TokenScores,
    sampled_ids: Int[Tensor, "*N"],
    candidate_ids: Int[Tensor, "*N K"],
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_sampled: Float[Tensor, "*N"],
    teacher_log_tail: Float[Tensor, "*N"] | None = None,
    *,
    mask: Bool[Tensor, "*N"] | None = None,
    temperature: float = 1.0,
    baseline: str | None = None,
    behaviour_log_probs: Float[Tensor, "*N"] | None = None,
    importance_cap: float | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(student || teacher) whose gradient is unbiased on policy, from K candidates and the sampled token.

    Args:
        student: [..., V] logits with gradient, or their scores at these ids.
        sampled_ids: [...] the token y that was drawn.
        candidate_ids: [..., K] distinct, chosen without looking at y: the student's top-k (payload gather), the
            teacher's (payload topk), also of an older policy.
        teacher_log_probs: [..., K] at the candidates, over the teacher's full vocabulary at `temperature`.
        teacher_sampled: [...] at y.
        teacher_log_tail: [...] the teacher's log mass outside the candidates; enables the `tail_mean` baseline.
        mask: [...] bool, True where a token counts.
        temperature: of the student's logits, not applied to ready scores; sampling must have used the same.
        baseline: "tail_mean", "head_kl", "none", or None for the best available: `tail_mean` with a teacher tail,
            else `head_kl` for K > 1, else `none`.
        behaviour_log_probs: [...] log-probs of y under the policy that drew it, when that is not the student any more:
            the tail is weighted with w = p(y) / mu(y). The head needs no weight.
        importance_cap: upper bound of w; leaves a bias of the tail mass where w exceeds it. None for no cap.
        check_values: whether to refuse bad values; by default on CPU only.

    Returns:
        `per_token` is an unbiased estimate of the KL in nats (single tokens may be negative); its gradient is the
        estimator's; infinite, with a gradient that is not finite, where the student has mass on a candidate or a y that
        the teacher excludes. Diagnostics: head_kl, tail_sampled (1 where y is outside the candidates),
        importance_weight, with a cap importance_truncated (1 where it bites), and what
        `opd.maths.diagnostics.head_and_tail_masses` gives.

    Raises:
        ValueError: for shapes, dtypes, ids or settings that cannot work.
    """
    check_temperature(temperature)
    if not isinstance(student, TokenScores):
        student = score_tokens(
            student,
            candidate_ids=candidate_ids,
            sampled_ids=sampled_ids,
            temperature=temperature,
            mask=mask,
            check_values=check_values,
        )
    _check_teacher(student, candidate_ids, sampled_ids, teacher_log_probs, teacher_sampled, teacher_log_tail)
    check_mask("mask", mask, tuple(student.sampled.shape), "sampled_ids")
    targets = {
        "teacher_log_probs": teacher_log_probs,
        "teacher_sampled": teacher_sampled,
        "teacher_log_tail": teacher_log_tail,
    }
    for name, values in targets.items():
        if values is not None:
            # Not normalised: targets adjusted by a reference are log-weights, which may exceed 0
            # (`opd.maths.reference`).
            check_log_probs(name, values, mask, check_values, normalised=False)
    baseline = _resolve_baseline(baseline, candidate_ids.shape[-1], teacher_log_tail is not None)
    weight = importance_weight(student.sampled, behaviour_log_probs, importance_cap, mask, check_values)
    # A y among the candidates is in the head's sum already: its tail term would count it twice.
    outside = ~(candidate_ids == sampled_ids.unsqueeze(-1)).any(-1)
    ratios = log_ratio(student.candidates, teacher_log_probs, mask), log_ratio(student.sampled, teacher_sampled, mask)
    tail_mean = torch.zeros_like(weight)
    if baseline == "tail_mean" and teacher_log_tail is not None:
        tail_mean = _tail_mean(student, teacher_log_probs, teacher_log_tail)
    per_token, head_kl = _head_and_tail(student, *ratios, torch.where(outside, weight, 0.0), tail_mean, baseline)
    diagnostics = {
        "head_kl": head_kl,
        "tail_sampled": outside.to(weight.dtype),
        "importance_weight": weight,
        **truncation(weight, importance_cap),
        **head_and_tail_masses(student.candidates, student.log_tail, teacher_log_probs, teacher_log_tail),
    }
    return reduced(per_token, mask, student_entropy=student.entropy, diagnostics=diagnostics)


def _head_and_tail(
    student: TokenScores,
    head_ratio: Float[Tensor, "*N K"],
    tail_ratio: Float[Tensor, "*N"],
    tail_weight: Float[Tensor, "*N"],
    tail_mean: Float[Tensor, "*N"],
    baseline: str,
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    """The per-token loss of the module's formula, and the head's share of the KL.

    Args:
        student: scores with gradient.
        head_ratio: log p - log q at the candidates, detached.
        tail_ratio: the same at y.
        tail_weight: importance weight of y where it is outside the candidates, else 0.
        tail_mean: c of the `tail_mean` baseline, else zeros.
        baseline: one of `BASELINES`.
    """
    p, tail_mass = student.candidates.detach().exp(), student.log_tail.detach().exp()
    # An id without mass adds nothing, also where the teacher excludes it: 0 * inf would be NaN.
    head_kl = torch.where(p > 0, p * head_ratio, 0.0).sum(-1)
    shift = torch.zeros_like(head_kl)
    if baseline == "head_kl":
        shift = torch.where(head_kl.isfinite(), head_kl, shift)
    # `shift` is taken off head and tail, which moves no expectation: the gradients of p sum to 0.
    centre = shift + tail_mean
    tail_coefficient = torch.where(tail_weight > 0, tail_weight * (tail_ratio - centre), 0.0)
    surrogate = (p * (head_ratio - shift.unsqueeze(-1)) * _finite(student.candidates)).sum(-1)
    # tail_mean is taken off the sampled tail alone; the gradient that this removes in expectation is known: tail_mean
    # times that of the tail's mass.
    surrogate = surrogate + tail_mass * tail_mean * _finite(student.log_tail)
    surrogate = surrogate + tail_coefficient * _finite(student.sampled)
    # The value is an estimate of the KL itself, baselines put back; the surrogate's own number means nothing.
    return with_value(surrogate, head_kl + tail_coefficient + tail_mass * centre), head_kl


def _finite(log_probs: Tensor) -> Tensor:
    """Log-probs with -inf, which carries no mass and no gradient, replaced by 0."""
    return torch.where(log_probs.isneginf(), torch.zeros_like(log_probs), log_probs)


def with_value(surrogate: Tensor, value: Tensor) -> Tensor:
    """A tensor with the numbers of `value`, also where they are infinite, and the gradient of `surrogate`."""
    found: Tensor = _WithValue.apply(surrogate, value)
    return found


class _WithValue(torch.autograd.Function):
    """Not value + (surrogate - sg(surrogate)): that is NaN where both are infinite."""

    @staticmethod
    def forward(ctx: Any, surrogate: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def log_ratio(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """The ratio log p - log q, detached; 0 where masked and where neither side has any mass."""
    student, teacher = student.detach(), teacher.detach().to(student.dtype)
    unused = student.isneginf()
    if mask is not None:
        unused = unused | ~mask.reshape(*mask.shape, *(1,) * (student.ndim - mask.ndim))
    return torch.where(unused, torch.zeros_like(student), student - teacher)


def importance_weight(
    student: Tensor, behaviour: Tensor | None, cap: float | None, mask: Tensor | None, check_values: bool | None = None
) -> Float[Tensor, "..."]:
    """Detached p(y) / mu(y), at most `cap`; ones without a behaviour policy and where masked, 0 where p(y) is.

    Raises:
        ValueError: for a cap without behaviour log-probs, a cap that is not positive, a wrong shape, or behaviour
            log-probs that are not valid.
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"importance_cap must be above 0 or None, but is {cap!r}.")
    if behaviour is None:
        if cap is not None:
            raise ValueError(f"importance_cap is {cap!r} but behaviour_log_probs is None; give both or neither.")
        return torch.ones_like(student.detach())
    check_shape("behaviour_log_probs", behaviour, tuple(student.shape), "sampled_ids")
    check_log_probs("behaviour_log_probs", behaviour, mask, check_values)
    weight = log_ratio(student, behaviour, mask).exp()
    # `log_ratio` is 0 where p(y) is 0, lest -inf - -inf be NaN; the weight is 0 there, and not e^0.
    excluded = student.detach().isneginf()
    weight = torch.where(excluded if mask is None else excluded & mask, 0.0, weight)
    return weight if cap is None else weight.clamp(max=cap)


def truncation(weight: Float[Tensor, "*N"], cap: float | None) -> dict[str, Float[Tensor, "*N"]]:
    """Diagnostic importance_truncated: 1 where the weight is at its cap; nothing without a cap."""
    return {} if cap is None else {"importance_truncated": (weight >= cap).to(weight.dtype)}


def _tail_mean(
    student: TokenScores, teacher_log_probs: Float[Tensor, "*N K"], teacher_log_tail: Float[Tensor, "*N"]
) -> Float[Tensor, "*N"]:
    """Estimate of E[r | tail]: the ratio of the tail masses plus the KL between the head's conditionals.

    The first summand is the tail's mean r up to the KL between the tail's conditionals, which the head's stands in for.
    Zero where either tail is empty or the head cannot be compared.
    """
    dtype = student.log_tail.dtype
    mean = student.log_tail.detach() - teacher_log_tail.detach().to(dtype)
    if teacher_log_probs.shape[-1] > 1:
        log_p = student.candidates.detach().log_softmax(-1)
        log_q = teacher_log_probs.detach().to(dtype).log_softmax(-1)
        mean = mean + torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
    return torch.where(mean.isfinite(), mean, torch.zeros_like(mean))


def _resolve_baseline(baseline: str | None, k: int, has_tail: bool) -> str:
    if baseline is None:
        return "tail_mean" if has_tail and k else "head_kl" if k > 1 else "none"
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)} or None, but is {baseline!r}.")
    if baseline == "tail_mean" and not has_tail:
        raise ValueError("baseline 'tail_mean' needs teacher_log_tail, which is None; use 'head_kl'.")
    return baseline


def _check_teacher(
    student: TokenScores,
    candidate_ids: Tensor,
    sampled_ids: Tensor,
    teacher_log_probs: Tensor,
    teacher_sampled: Tensor,
    teacher_log_tail: Tensor | None,
) -> None:
    leading = tuple(student.sampled.shape)
    check_shape("candidate_ids", candidate_ids, tuple(student.candidates.shape), "the student's scores")
    check_shape("sampled_ids", sampled_ids, leading, "the student's scores")
    check_shape("teacher_log_probs", teacher_log_probs, tuple(candidate_ids.shape), "candidate_ids")
    check_shape("teacher_sampled", teacher_sampled, leading, "sampled_ids")
    if teacher_log_tail is not None:
        check_shape("teacher_log_tail", teacher_log_tail, leading, "sampled_ids")
