"""The definition of every divergence: its summand and its slope at one vocabulary entry.

With p the student's probability, q the teacher's and D = sum_i phi(p_i, q_i), a divergence is fixed by

    term  = phi(p, q)               summed over the vocabulary: the value, in nats
    slope = p * d phi / d p         up to a multiple of p, which cancels in the softmax's gradient if p sums to one

and its gradient with respect to the student's logits is  slope_i - p_i * sum_j slope_j. The exact divergences on
logits, the tiled linear divergences and the bucketed top-k forms all call `term_and_slope`; the Triton kernel mirrors
it and is tested against it.

    forward_kl        KL(T || S)                        term  q (log q - log p)       slope  -q
    reverse_kl        KL(S || T)                        term  p (log p - log q)       slope  p (log p - log q)
    jsd               w KL(T || M) + (1-w) KL(S || M)   M = w T + (1-w) S             slope  (1-w) p (log p - log m)
    skew_forward_kl   KL(T || w T + (1-w) S)                                          slope  -(1-w) p q / m
    skew_reverse_kl   KL(S || w S + (1-w) T)                                          slope  p (log p - log m - w p / m)
    total_variation   1/2 sum |p - q|                                                 slope  p sign(p - q) / 2

The logarithm of the mixture m = w q + (1-w) p is computed as log m = log p + softplus(x) - softplus(logit w) with x =
log q - log p + logit w. The sum itself underflows where both probabilities do, and loses the smaller of two
probabilities that differ a lot.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.checks import check_fraction


class Kind(StrEnum):
    """Names of the divergences; T is the teacher, S the student."""

    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"
    SKEW_FORWARD_KL = "skew_forward_kl"
    SKEW_REVERSE_KL = "skew_reverse_kl"
    TOTAL_VARIATION = "total_variation"


@dataclass(frozen=True, slots=True)
class Spec:
    """One divergence.

    Attributes:
        kind: which divergence.
        weight: the mixture weight w of jsd (beta) and of the skewed KLs (alpha); unused otherwise.
        scale: multiplies the value; 1 / (w (1 - w)) for the normalised jsd.
    """

    kind: Kind
    weight: float = 0.0
    scale: float = 1.0


_NAMES = tuple(kind.value for kind in Kind)
_WEIGHTED = (Kind.JSD, Kind.SKEW_FORWARD_KL, Kind.SKEW_REVERSE_KL)


def divergence_spec(kind: str, *, weight: float | None = None, normalised: bool = False) -> Spec:
    """The `Spec` of a divergence by name; a weight at the end of its range gives the divergence that it reduces to.

    Args:
        kind: a name from `Kind`.
        weight: beta of jsd, the teacher's share of the mixture, or alpha of a skewed KL.
        normalised: for jsd only: divide by beta (1 - beta), which tends to forward_kl at 0 and reverse_kl at 1.

    Raises:
        ValueError: if the kind is unknown, or the weight is missing, superfluous or out of range.
    """
    if kind not in _NAMES:
        raise ValueError(f"kind must be one of {', '.join(_NAMES)}, but is {kind!r}.")
    kind = Kind(kind)
    if normalised and kind is not Kind.JSD:
        raise ValueError(f"normalised applies to kind 'jsd' only, but kind is {kind.value!r}.")
    if kind not in _WEIGHTED:
        if weight is not None:
            raise ValueError(f"kind {kind.value!r} takes no mixture weight, but it is {weight!r}; leave it out.")
        return Spec(kind)
    if weight is None:
        raise ValueError(f"kind {kind.value!r} needs a mixture weight (beta of jsd, alpha of a skewed KL).")
    if kind is not Kind.JSD:
        check_fraction("alpha", weight, high_open=True, hint="at 1 the skewed KL is identically zero")
        # At alpha 0 the mixture is one of the two models and the divergence a plain KL; the formula would need
        # logit(0).
        if weight == 0:
            return Spec(Kind.FORWARD_KL if kind is Kind.SKEW_FORWARD_KL else Kind.REVERSE_KL)
        return Spec(kind, weight)
    if not normalised:
        hint = "at the ends the JSD is identically zero: use forward_kl, reverse_kl or normalised=True"
        check_fraction("beta", weight, low_open=True, high_open=True, hint=hint)
        return Spec(kind, weight)
    check_fraction("beta", weight)
    # The limits of JSD / (beta (1 - beta)), where the formula is 0 / 0.
    if weight in (0.0, 1.0):
        return Spec(Kind.REVERSE_KL if weight else Kind.FORWARD_KL)
    return Spec(kind, weight, 1.0 / (weight * (1.0 - weight)))


def logit(weight: float) -> float:
    """log(w / (1 - w)) of a mixture weight in (0, 1)."""
    return math.log(weight) - math.log1p(-weight)


def _softplus_pair(x: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """(softplus(x), softplus(-x)) with softplus(x) = log(1 + e^x); accurate for any x, infinities included."""
    # log1p(e^-|x|) serves both signs: one exponential and one logarithm for the two results.
    shared = torch.log1p_(torch.exp_(x.abs().neg_()))
    return shared + x.clamp(min=0.0), shared.sub_(x.clamp(max=0.0))


def _log_odds(weight: float, like: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    # A tensor, not a float: its softplus is then rounded like that of the entries, so that log m - log p is exactly 0
    # where the models agree.
    return torch.full((), logit(weight), dtype=like.dtype, device=like.device)


def term_and_slope(
    spec: Spec,
    log_p: Float[Tensor, "*n V"],
    log_q: Float[Tensor, "*n V"],
    p: Float[Tensor, "*n V"] | None = None,
    q: Float[Tensor, "*n V"] | None = None,
    *,
    whole: bool = False,
) -> tuple[Float[Tensor, "*n V"], Float[Tensor, "*n V"]]:
    """Summand and slope of a divergence as the module defines them, before `spec.scale`.

    Args:
        spec: the divergence.
        log_p: log-probs of the student; -inf is allowed.
        log_q: log-probs of the teacher; -inf is allowed. An entry that is -inf on both sides contributes nothing.
        p: exp(log_p), if already computed.
        q: exp(log_q), if already computed.
        whole: return the slope as defined, for masses that do not sum to one. By default a multiple of p is subtracted,
            so that the slope is 0 at the most likely entry (except for forward_kl, whose slope is always whole).

    Returns:
        (term, slope), both shaped like `log_p`; +inf where the divergence is infinite.
    """
    p, q, w = log_p.exp() if p is None else p, log_q.exp() if q is None else q, spec.weight
    if spec.kind is Kind.FORWARD_KL:
        # Always whole: its gradient p - q involves no cancellation of large numbers.
        return _where_positive(q, q * (log_q - log_p)), -q
    if spec.kind is Kind.REVERSE_KL:
        tilt = log_p - log_q
        return _where_positive(p, p * tilt), _slope(p, tilt, whole)
    if spec.kind is Kind.TOTAL_VARIATION:
        # The slope jumps at p = q, where sign gives 0.
        gap = p - q
        return 0.5 * gap.abs(), _slope(p, 0.5 * gap.sign(), whole)
    odds = _log_odds(w if spec.kind is Kind.JSD else 1.0 - w, log_p)
    if spec.kind is Kind.SKEW_FORWARD_KL:
        log_ratio = _softplus_pair(log_p - log_q + odds)[0] - _softplus_pair(odds)[0]  # log m - log q
        return _where_positive(q, -q * log_ratio), _slope(p, (w - 1.0) * torch.exp(-log_ratio), whole)
    x = log_q - log_p + odds
    (p_under_m, q_under_m), (p_base, q_base) = _softplus_pair(x), _softplus_pair(odds)
    student_part = _where_positive(p, p * (p_base - p_under_m))  # p (log p - log m)
    # Without p_base, which is a multiple of p, what is left is as small as q / p where the teacher has almost no mass.
    if spec.kind is Kind.SKEW_REVERSE_KL:
        return student_part, _slope(p, torch.sigmoid(x) - p_under_m + (p_base - 1.0 if whole else 0.0), whole)
    teacher_part = _where_positive(q, q * (q_base - q_under_m))  # q (log q - log m)
    tilt = (1.0 - w) * (p_base - p_under_m if whole else -p_under_m)
    return w * teacher_part + (1.0 - w) * student_part, _slope(p, tilt, whole)


def _slope(p: Tensor, tilt: Tensor, whole: bool) -> Tensor:
    """The slope p * tilt if `whole`, else p * (tilt - tilt of the most likely entry).

    The gradient p_i (tilt_i - sum_j p_j tilt_j) is the same for both. Where the student is nearly certain of an entry,
    its gradient is a small difference of large numbers, which would be lost to rounding unless tilts are relative to
    that entry's.
    """
    if not whole:
        tilt = tilt - tilt.gather(-1, p.argmax(-1, keepdim=True))
    return _where_positive(p, p * tilt)


def _where_positive(probability: Tensor, values: Tensor) -> Tensor:
    """`values`, in place, with 0 where the probability is 0: 0 log 0 = 0, even if the logarithm is infinite."""
    return values.masked_fill_(probability == 0, 0.0)
