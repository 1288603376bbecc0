"""Reverse KL from part of the teacher's distribution, exact on K candidates and sampled on the tail: the default loss.

    ids = student_logits.topk(64).indices                       # chosen without looking at the sampled token
    loss = head_tail_reverse_kl(student_logits, y, ids, teacher_log_probs, teacher_sampled, teacher_log_tail).mean

Let S be the set of candidates, p the student, q the teacher, r = log p - log q, y ~ p the sampled token, and sg the
stop-gradient. The gradient of KL(p || q) is sum_i p_i r_i grad log p_i. Its head, i in S, is summed exactly; its tail,
i not in S, is estimated from the one token that was sampled anyway. The gradient is that of

    sum_S sg(p_i (r_i - b)) log p_i  +  sg(p_tail (c - b)) log p_tail  +  1[y not in S] sg(w (r_y - c)) log p_y

with the importance weight w, which is 1 on policy. Any b and c that do not depend on y leave its expectation unchanged
for every K from 0 to V, so they are chosen for low variance:

    tail_mean   b = 0, c = log p_tail - log q_tail + KL between the head's conditionals, an estimate of the tail's mean
    r
    head_kl     b = c = sum_S p r
    none        b = c = 0

docs/estimators.md has the measured variances. Differentiating sum_S p r itself would add the gradient of p(S), which
moves mass out of the head (the "+1" bias, arXiv 2605.11182).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_log_probs, check_mask, check_shape, check_temperature
from opd.maths.diagnostics import head_and_tail_masses
from opd.maths.result import Divergence, reduced
from opd.maths.scores import TokenScores, score_tokens

#: The baselines that `head_tail_reverse_kl` offers; the module's docstring has their formulas.
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
    """KL(student || teacher) with a gradient that is unbiased on policy, from K candidates and the sampled token.

    Args:
        student: [..., V] logits with gradient, or their scores at these ids.
        sampled_ids: [...] the token y that was sampled.
        candidate_ids: [..., K] distinct ids, chosen without looking at y: the top k of the student (payload gather) or
            of the teacher (payload topk); those of an older policy will do.
        teacher_log_probs: [..., K] at the candidates, normalised over the teacher's full vocabulary at `temperature`.
        teacher_sampled: [...] the teacher's log-prob of y.
        teacher_log_tail: [...] the teacher's log mass outside the candidates; enables the `tail_mean` baseline.
        mask: [...] bool, True where a token counts.
        temperature: divides the student's logits; not applied to ready scores. y must have been sampled at the same
            one.
        baseline: "tail_mean", "head_kl" or "none". None chooses the best available: `tail_mean` with a teacher tail and
            K > 0, else `head_kl` for K > 1, else `none`.
        behaviour_log_probs: [...] log mu(y) of the policy that sampled y, if it is no longer the student: the tail is
            then weighted by w = p(y) / mu(y). The head needs no weight.
        importance_cap: upper bound on w. Where w exceeds it, the tail's part of the gradient is biased. None for no
            cap.
        check_values: whether to refuse invalid values; by default on CPU only.

    Returns:
        `per_token` is an unbiased estimate of the KL in nats, which may be negative for a single token; its gradient is
        that of the estimator. Both are infinite or NaN where the student has mass on a candidate or a y that the
        teacher excludes. Diagnostics: head_kl, tail_sampled (1 where y is outside the candidates), importance_weight,
        with a cap also importance_truncated (1 where w is at the cap), and the masses of
        `opd.maths.diagnostics.head_and_tail_masses`.

    Raises:
        ValueError: if a shape, a dtype, an id or a setting is not valid.
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
            # Not normalised: targets that a reference has adjusted are log-weights, which may exceed 0
            # (`opd.maths.reference`).
            check_log_probs(name, values, mask, check_values, normalised=False)
    baseline = _resolve_baseline(baseline, candidate_ids.shape[-1], teacher_log_tail is not None)
    weight = importance_weight(student.sampled, behaviour_log_probs, importance_cap, mask, check_values)
    # The head's sum already has a y that is among the candidates: a tail term would count it twice.
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
    """The per-token loss of the module's formula, and the head's part of the KL, sum_S p r.

    Args:
        student: scores with gradient.
        head_ratio: r at the candidates, detached.
        tail_ratio: r at y, detached.
        tail_weight: importance weight of y if it is outside the candidates, else 0.
        tail_mean: c of the `tail_mean` baseline, else zeros.
        baseline: one of `BASELINES`.
    """
    p, tail_mass = student.candidates.detach().exp(), student.log_tail.detach().exp()
    # An id without mass contributes nothing, even if the teacher excludes it: 0 * inf would be NaN.
    head_kl = torch.where(p > 0, p * head_ratio, 0.0).sum(-1)
    shift = torch.zeros_like(head_kl)
    if baseline == "head_kl":
        shift = torch.where(head_kl.isfinite(), head_kl, shift)
    # Subtracting `shift` from head and tail alike changes no expectation: the gradients of p sum to 0.
    centre = shift + tail_mean
    tail_coefficient = torch.where(tail_weight > 0, tail_weight * (tail_ratio - centre), 0.0)
    surrogate = (p * (head_ratio - shift.unsqueeze(-1)) * _finite(student.candidates)).sum(-1)
    # tail_mean is subtracted from the sampled tail only. What that removes in expectation is known, tail_mean times the
    # gradient of the tail's mass, and is added back here.
    surrogate = surrogate + tail_mass * tail_mean * _finite(student.log_tail)
    surrogate = surrogate + tail_coefficient * _finite(student.sampled)
    # The value estimates the KL itself, with the baselines added back; the surrogate's own value has no meaning.
    return with_value(surrogate, head_kl + tail_coefficient + tail_mass * centre), head_kl


def _finite(log_probs: Tensor) -> Tensor:
    """Log-probs with 0 in place of -inf, which carries neither mass nor gradient."""
    return torch.where(log_probs.isneginf(), torch.zeros_like(log_probs), log_probs)


def with_value(surrogate: Tensor, value: Tensor) -> Tensor:
    """A tensor with the values of `value`, infinite ones included, and the gradient of `surrogate`."""
    found: Tensor = _WithValue.apply(surrogate, value)
    return found


class _WithValue(torch.autograd.Function):
    """Used instead of value + (surrogate - sg(surrogate)), which is NaN where a term is infinite."""

    @staticmethod
    def forward(ctx: Any, surrogate: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def log_ratio(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """The log-ratio log p - log q, detached; 0 where masked, and where the student has no mass."""
    student, teacher = student.detach(), teacher.detach().to(student.dtype)
    unused = student.isneginf()
    if mask is not None:
        unused = unused | ~mask.reshape(*mask.shape, *(1,) * (student.ndim - mask.ndim))
    return torch.where(unused, torch.zeros_like(student), student - teacher)


def importance_weight(
    student: Tensor, behaviour: Tensor | None, cap: float | None, mask: Tensor | None, check_values: bool | None = None
) -> Float[Tensor, "..."]:
    """p(y) / mu(y), detached and at most `cap`; 1 without a behaviour policy and where masked, 0 where p(y) is 0.

    Raises:
        ValueError: if there is a cap without behaviour log-probs, or the cap, the shape or a behaviour log-prob is not
            valid.
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
    # `log_ratio` returns 0 where p(y) is 0, to avoid -inf - -inf; the weight is 0 there, not e^0.
    excluded = student.detach().isneginf()
    weight = torch.where(excluded if mask is None else excluded & mask, 0.0, weight)
    return weight if cap is None else weight.clamp(max=cap)


def truncation(weight: Float[Tensor, "*N"], cap: float | None) -> dict[str, Float[Tensor, "*N"]]:
    """Diagnostic importance_truncated: 1 where the weight is at its cap; nothing without a cap."""
    return {} if cap is None else {"importance_truncated": (weight >= cap).to(weight.dtype)}


def _tail_mean(
    student: TokenScores, teacher_log_probs: Float[Tensor, "*N K"], teacher_log_tail: Float[Tensor, "*N"]
) -> Float[Tensor, "*N"]:
    """Estimate of E[r | tail]: the log-ratio of the tail masses plus the KL between the heads' conditionals.

    E[r | tail] is exactly the log-ratio of the tail masses plus the KL between the tails' conditionals; the head's
    stands in for the latter. Zero where either tail is empty or the KL of the head is not finite.
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
