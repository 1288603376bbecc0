"""The one definition of every divergence: its summand and its slope at one vocabulary entry.

With p the student's probability, q the teacher's and D = sum_i phi(p_i, q_i), a divergence is fixed by

    term  = phi(p, q)               summed over the vocabulary: the value, in nats
    slope = p * d phi / d p         up to a multiple of p, which the softmax cancels where p sums to one

and its gradient with respect to the student's logits is  slope_i - p_i * sum_j slope_j. The exact divergences on
logits, the tiled linear kernels and the bucketed top-k forms all call `term_and_slope`; the Triton kernel mirrors it
and is tested against it.

    forward_kl        KL(T || S)                        term  q (log q - log p)       slope  -q
    reverse_kl        KL(S || T)                        term  p (log p - log q)       slope  p (log p - log q)
    jsd               w KL(T || M) + (1-w) KL(S || M)   M = w T + (1-w) S             slope  (1-w) p (log p - log m)
    skew_forward_kl   KL(T || w T + (1-w) S)                                          slope  -(1-w) p q / m
    skew_reverse_kl   KL(S || w S + (1-w) T)                                          slope  p (log p - log m - w p / m)
    total_variation   1/2 sum |p - q|                                                 slope  p sign(p - q) / 2
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
        kind: which.
        weight: the mixture weight w of jsd (beta) and of the skewed KLs (alpha); unused otherwise.
        scale: multiplies the value; 1 / (w (1 - w)) for the normalised jsd.
    """

    kind: Kind
    weight: float = 0.0
    scale: float = 1.0


_NAMES = tuple(kind.value for kind in Kind)
_WEIGHTED = (Kind.JSD, Kind.SKEW_FORWARD_KL, Kind.SKEW_REVERSE_KL)


def divergence_spec(kind: str, *, weight: float | None = None, normalised: bool = False) -> Spec:
    """The spec of a divergence by name, with degenerate weights resolved to what they mean.

    Args:
        kind: a name of `Kind`.
        weight: jsd's beta, the teacher's share of the mixture, or the alpha of a skewed KL.
        normalised: jsd only: divide by beta (1 - beta), which tends to forward_kl at 0 and reverse_kl at 1.

    Raises:
        ValueError: for an unknown kind, a missing or superfluous weight, or a weight out of range.
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
        if weight == 0:
            return Spec(Kind.FORWARD_KL if kind is Kind.SKEW_FORWARD_KL else Kind.REVERSE_KL)
        return Spec(kind, weight)
    if not normalised:
        hint = "at the ends the JSD is identically zero: use forward_kl, reverse_kl or normalised=True"
        check_fraction("beta", weight, low_open=True, high_open=True, hint=hint)
        return Spec(kind, weight)
    check_fraction("beta", weight)
    if weight in (0.0, 1.0):
        return Spec(Kind.REVERSE_KL if weight else Kind.FORWARD_KL)
    return Spec(kind, weight, 1.0 / (weight * (1.0 - weight)))


def is_moderate(weight: float) -> bool:
    """Whether the mixture w T + (1 - w) S has an accurate logarithm: it is at least a hundredth of either side."""
    return 0.01 <= weight <= 0.99


def log_mix_ratio(weight: float, log_ratio: Tensor) -> Tensor:
    """log(1 - w + w e^r), accurate for small w and small r, free of overflow for large r.

    Args:
        weight: w in (0, 1).
        log_ratio: r, any shape; -inf and +inf allowed.
    """
    bounded = torch.log1p(weight * torch.expm1(log_ratio.clamp(max=20.0)))
    grown = log_ratio + math.log(weight) + torch.log1p((1.0 - weight) / weight * torch.exp(-log_ratio.clamp(min=20.0)))
    return torch.where(log_ratio > 20.0, grown, bounded)


def term_and_slope(
    spec: Spec,
    log_p: Float[Tensor, "..."],
    log_q: Float[Tensor, "..."],
    p: Float[Tensor, "..."] | None = None,
    q: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Summand and slope of a divergence (see the module), before `spec.scale`.

    Args:
        spec: the divergence.
        log_p: log-probs of the student; -inf allowed.
        log_q: log-probs of the teacher; -inf allowed. Entries that are -inf on both sides contribute nothing.
        p: exp(log_p), if at hand.
        q: exp(log_q), if at hand.

    Returns:
        (term, slope), both like `log_p`; +inf where the divergence is infinite.
    """
    p, q, w = log_p.exp() if p is None else p, log_q.exp() if q is None else q, spec.weight
    if spec.kind is Kind.FORWARD_KL:
        return _where_positive(q, q * (log_q - log_p)), -q
    if spec.kind is Kind.REVERSE_KL:
        term = _where_positive(p, p * (log_p - log_q))
        return term, term
    if spec.kind is Kind.TOTAL_VARIATION:
        gap = p - q
        return 0.5 * gap.abs(), 0.5 * p * gap.sign()
    if spec.kind is Kind.JSD:
        if is_moderate(w):
            log_m = torch.add(w * q, p, alpha=1.0 - w).log_()
            student_part, teacher_part = p * (log_p - log_m), q * (log_q - log_m)
        else:
            student_part, teacher_part = (
                -p * log_mix_ratio(w, log_q - log_p),
                -q * log_mix_ratio(1.0 - w, log_p - log_q),
            )
        student_part, teacher_part = _where_positive(p, student_part), _where_positive(q, teacher_part)
        return w * teacher_part + (1.0 - w) * student_part, (1.0 - w) * student_part
    if spec.kind is Kind.SKEW_FORWARD_KL:
        log_ratio = log_mix_ratio(1.0 - w, log_p - log_q)  # log m - log q
        return _where_positive(q, -q * log_ratio), _where_positive(q, -(1.0 - w) * p * torch.exp(-log_ratio))
    log_ratio = log_mix_ratio(1.0 - w, log_q - log_p)  # log m - log p
    term = _where_positive(p, -p * log_ratio)
    return term, term - _where_positive(p, w * p * torch.exp(-log_ratio))


def _where_positive(probability: Tensor, values: Tensor) -> Tensor:
    """`values`, in place, where the probability is positive, else 0: 0 log 0 = 0, also against an infinite log."""
    return values.masked_fill_(probability == 0, 0.0)
