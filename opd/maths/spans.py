"""Reverse KL over spans of text, against a teacher whose tokens are not the student's.

A span m is a run of the student's tokens y_i whose text is also a run of the teacher's tokens. With both models'
log-probs of that text, r_m = sum_i log p(y_i) - log q(m), the loss of token i is sg(w_m r_m) log p(y_i): a policy
gradient in which each token is credited with what its whole span says. sum_m r_m is an unbiased value of the reverse KL
between the student's tokens and the teacher's canonical tokens of the same text. With spans of one token each this is
`sampled_reverse_kl`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_log_probs, check_mask, check_shape
from opd.maths.head_tail import importance_weight, log_ratio, truncation, with_value
from opd.maths.result import Divergence, reduced
from opd.maths.scores import TokenScores


def sum_over_spans(values: Float[Tensor, " n"], span: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """At each position, the sum of the values of its span; 0 where `span` is -1.

    Args:
        values: [N].
        span: [N] the first position of the span; -1 for none.
    """
    inside, place = span >= 0, span.clamp(min=0)
    kept = torch.where(inside, values, torch.zeros_like(values))
    return torch.where(inside, torch.zeros_like(values).index_add(0, place, kept)[place], kept)


def span_reverse_kl(
    student: TokenScores,
    span: Int[Tensor, " n"],
    teacher_sampled: Float[Tensor, " n"],
    *,
    mask: Bool[Tensor, " n"] | None = None,
    behaviour_log_probs: Float[Tensor, " n"] | None = None,
    importance_cap: float | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """KL(student || teacher) from both models' log-probs of the text of spans.

    Args:
        student: scores of the sampled tokens, with gradient.
        span: [N] the first position of each token's span; -1 for tokens without one.
        teacher_sampled: [N] nats, which sum over each span to the teacher's log-prob of its text.
        mask: [N] bool, True where a token is trained on; a span's log-ratio counts its other tokens too.
        behaviour_log_probs: [N] log-probs of the policy that sampled: spans are weighted by w = p(m) / behaviour(m).
        importance_cap: upper bound on w; None for no cap.
        check_values: whether to refuse invalid values; by default on CPU only.

    Returns:
        `per_token` has the values of w r_m / (number of tokens in m) and the gradient of w r_m log p(y_i); 0 where
        `span` is -1. Diagnostics: log_ratio (r_m), importance_weight and, with a cap, importance_truncated.

    Raises:
        ValueError: if a shape, a dtype or a setting is not valid.
    """
    log_p = student.sampled
    check_shape("span", span, tuple(log_p.shape), "the student's scores")
    check_shape("teacher_sampled", teacher_sampled, tuple(log_p.shape), "the student's scores")
    check_mask("mask", mask, tuple(log_p.shape), "the student's scores")
    if behaviour_log_probs is not None:
        check_shape("behaviour_log_probs", behaviour_log_probs, tuple(log_p.shape), "the student's scores")
    counted = span >= 0 if mask is None else mask & (span >= 0)
    check_log_probs("teacher_sampled", teacher_sampled, counted, check_values, normalised=False)
    ratio = sum_over_spans(log_ratio(log_p, teacher_sampled, span >= 0), span)
    behaviour = None if behaviour_log_probs is None else sum_over_spans(behaviour_log_probs, span)
    weight = importance_weight(sum_over_spans(log_p.detach(), span), behaviour, importance_cap, counted, check_values)
    size = sum_over_spans(torch.ones_like(ratio), span).clamp(min=1.0)
    # 0 where masked, where log p may be anything.
    credit = torch.where(counted, weight * ratio, torch.zeros_like(ratio))
    return reduced(
        with_value(credit * log_p, credit / size),
        counted,
        student_entropy=student.entropy,
        diagnostics={"log_ratio": ratio, "importance_weight": weight} | truncation(weight, importance_cap),
    )
