"""Divergences over K ids per position, with the rest of the vocabulary as one bucket or by generalised divergences.

    loss = topk_divergence(student_logits, ids, teacher_log_probs, teacher_log_tail, kind="forward_kl").mean

Plain truncation of the sum to K entries is wrong at the optimum (its gradient keeps sharpening the student when it
equals the teacher), clamping the truncated sum at zero deletes gradients, and renormalising over the K ids is blind to
mass outside them. Offered instead:

    bucket        K + 1 classes, with everything outside the K ids as one class: a true divergence between coarser
                  distributions, hence non-negative, a lower bound of the full one, and exact at K = V
    generalised   sum_K q log(q/p) - q + p (and its mirror): non-negative without a tail; kinds forward_kl, reverse_kl
                  and jsd

The ids may be the teacher's top k (payload topk) or the caller's choice (payload gather).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_log_probs, check_mask, check_shape, check_temperature
from opd.maths.diagnostics import head_and_tail_masses
from opd.maths.pointwise import Kind, Spec, divergence_spec, term_and_slope
from opd.maths.result import Divergence, reduced
from opd.maths.scores import TokenScores, score_tokens

#: How the mass outside the K ids enters.
TAILS = ("bucket", "generalised")
_GENERALISED_KINDS = (Kind.FORWARD_KL, Kind.REVERSE_KL, Kind.JSD)


def topk_divergence(
    student: Float[Tensor, "*N V"] | TokenScores,
    candidate_ids: Int[Tensor, "*N K"],
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_log_tail: Float[Tensor, "*N"] | None = None,
    *,
    kind: str = "forward_kl",
    tail: str = "bucket",
    weight: float | None = None,
    normalised: bool = False,
    mask: Bool[Tensor, "*N"] | None = None,
    temperature: float = 1.0,
    check_values: bool | None = None,
) -> Divergence:
    """A divergence over K ids per position that accounts for the mass outside them on both sides.

    Args:
        student: [..., V] logits with gradient, or their scores at `candidate_ids`.
        candidate_ids: [..., K] distinct within a position.
        teacher_log_probs: [..., K] at the candidates, normalised over the teacher's full vocabulary at `temperature`.
        teacher_log_tail: [...] the teacher's log mass outside the candidates; required by tail "bucket".
        kind: "forward_kl" KL(T || S), "reverse_kl" KL(S || T), "jsd", "skew_forward_kl", "skew_reverse_kl" or
            "total_variation"; the last three with tail "bucket" only.
        tail: "bucket" or "generalised".
        weight: beta of jsd or alpha of a skewed KL, as for the exact divergences.
        normalised: divide jsd by beta (1 - beta).
        mask: [...] bool, True where a token counts.
        temperature: divides the student's logits; not applied to ready scores.
        check_values: whether to refuse invalid values; by default on CPU only.

    Returns:
        Nats per token, non-negative. With tail "bucket" the value is at most the full divergence; the error, and that
        of the gradient, vanishes with the tail. Diagnostics: the masses of
        `opd.maths.diagnostics.head_and_tail_masses`.

    Raises:
        ValueError: if a shape, a dtype, an id or a setting is not valid.
    """
    spec = divergence_spec(kind, weight=weight, normalised=normalised)
    _check_tail(spec, tail, teacher_log_tail is not None)
    check_temperature(temperature)
    if not isinstance(student, TokenScores):
        student = score_tokens(
            student, candidate_ids=candidate_ids, temperature=temperature, mask=mask, check_values=check_values
        )
    head = student.candidates
    check_shape("candidate_ids", candidate_ids, tuple(head.shape), "the student's scores")
    check_shape("teacher_log_probs", teacher_log_probs, tuple(head.shape), "candidate_ids")
    check_mask("mask", mask, tuple(head.shape[:-1]), "candidate_ids")
    check_log_probs("teacher_log_probs", teacher_log_probs, mask, check_values)
    if teacher_log_tail is not None:
        check_shape("teacher_log_tail", teacher_log_tail, tuple(head.shape[:-1]), "candidate_ids")
        check_log_probs("teacher_log_tail", teacher_log_tail, mask, check_values)
    teacher = teacher_log_probs.detach().to(head.dtype)
    buckets = head
    if tail == "bucket" and teacher_log_tail is not None:
        buckets = torch.cat([head, student.log_tail.unsqueeze(-1)], dim=-1)
        teacher = torch.cat([teacher, teacher_log_tail.detach().to(head.dtype).unsqueeze(-1)], dim=-1)
    if mask is not None:  # equal buckets have neither value nor gradient
        teacher = torch.where(mask.unsqueeze(-1), teacher, buckets.detach())
    per_token = _BucketDivergence.apply(buckets, teacher, spec, tail == "generalised")
    diagnostics = head_and_tail_masses(head, student.log_tail, teacher_log_probs, teacher_log_tail)
    return reduced(per_token, mask, student_entropy=student.entropy, diagnostics=diagnostics)


def _check_tail(spec: Spec, tail: str, has_tail: bool) -> None:
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, but is {tail!r}.")
    if tail == "bucket" and not has_tail:
        raise ValueError("tail 'bucket' needs teacher_log_tail, which is None; pass it or use tail 'generalised'.")
    if tail == "generalised" and spec.kind not in _GENERALISED_KINDS:
        raise ValueError(
            f"tail 'generalised' supports {', '.join(_GENERALISED_KINDS)}, but kind is {spec.kind.value!r}."
        )


class _BucketDivergence(torch.autograd.Function):
    """Divergence between [..., B] log-masses, differentiated with respect to the student's.

    If the masses sum to one, a multiple of p in the slope cancels, because the gradients of the log-masses are those of
    a softmax. The generalised forms, whose masses do not, need the whole slope.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, spec: Spec, generalised: bool) -> Tensor:
        term, slope = term_and_slope(spec, student, teacher, whole=generalised)
        # Adding the difference of the masses makes the partial sum non-negative, which the sum of q log(q / p) over
        # some ids is not. Its slope p is added for the forward KL; for the reverse KL it cancels that of p log(p / q).
        if generalised and spec.kind is Kind.FORWARD_KL:
            term, slope = term + student.exp() - teacher.exp(), slope + student.exp()
        elif generalised and spec.kind is Kind.REVERSE_KL:
            term = term - student.exp() + teacher.exp()
        ctx.save_for_backward(slope)
        ctx.scale = spec.scale
        return term.sum(-1) * spec.scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * (grad * ctx.scale).unsqueeze(-1), None, None, None
