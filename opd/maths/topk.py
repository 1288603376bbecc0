"""Divergences over the top-k support that the wire carries, closed by a tail bucket or generalised to part masses.

    loss = topk_divergence(student_logits, ids, teacher_log_probs, teacher_log_tail, kind="forward_kl").mean

Truncating the sum to K entries is wrong at the optimum (it keeps sharpening when student equals teacher), clamping it
at zero deletes gradients, and renormalising over k is blind to mass outside. Offered instead:

    bucket        K + 1 classes, everything outside the support being one: a true divergence between coarse
                  distributions, hence non-negative, a lower bound of the full one, and exact at K = V
    generalised   sum_K q log(q/p) - q + p (and its mirror): non-negative without any tail; kinds forward_kl,
                  reverse_kl and jsd

Either support works: the teacher's top-k (payload topk) or the caller's ids (payload gather).
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

#: How the mass outside the support enters.
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
    """A divergence restricted to K ids per position, with the tail accounted for on both sides.

    Args:
        student: [..., V] logits with gradient, or their scores at `candidate_ids`.
        candidate_ids: [..., K] distinct within a position.
        teacher_log_probs: [..., K] at the candidates, over the teacher's full vocabulary at `temperature`.
        teacher_log_tail: [...] the teacher's log mass outside; needed by tail "bucket".
        kind: "forward_kl" KL(T || S), "reverse_kl" KL(S || T), "jsd", "skew_forward_kl", "skew_reverse_kl" or
            "total_variation"; the last three with tail "bucket" only.
        tail: "bucket" or "generalised".
        weight: beta of jsd or alpha of a skewed KL, as for the exact divergences.
        normalised: jsd divided by beta (1 - beta).
        mask: [...] bool, True where a token counts.
        temperature: of the student's logits, not applied to ready scores.
        check_values: whether to refuse bad values; by default on CPU only.

    Returns:
        Nats per token, non-negative. Biased low against the full divergence (bucket) with an error that vanishes with
        the tail; the gradient likewise. Diagnostics: what `opd.maths.diagnostics.head_and_tail_masses` gives.

    Raises:
        ValueError: for shapes, dtypes, ids or settings that cannot work.
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
    if mask is not None:  # equal buckets: no value, no gradient
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
    """Divergence of [..., B] log-masses, differentiated with respect to the student's log-masses.

    Over buckets that sum to one a multiple of p in the slope cancels, because the gradients of the log-masses are those
    of a softmax; the generalised forms, whose masses do not sum to one, need the whole slope.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, spec: Spec, generalised: bool) -> Tensor:
        term, slope = term_and_slope(spec, student, teacher, whole=generalised)
        # The masses' difference makes the part sums non-negative, which p log(p / q) over some ids is not; its slope p
        # is added here, and cancels in the reverse KL's.
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
