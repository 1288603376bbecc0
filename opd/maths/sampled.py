"""Reverse KL from the sampled token alone: 4 bytes per token on the wire, unbiased gradient, highest variance.

With r = log p(y) - log q(y) at the sampled token y ~ p (p the student, q the teacher, sg the stop-gradient):

    policy_gradient   loss sg(w (r - b)) log p(y)    gradient unbiased for KL(p || q); b is a control variate
    k2                loss r^2 / 2                   the same gradient per sample as policy_gradient with b = 0
    k1_loss           loss r, differentiated         expected gradient exactly zero: it trains nothing
    k3_loss           loss q/p - 1 + r               expected gradient that of KL(q || p), the forward KL

As losses for the reverse KL the last two are biased, and refused unless the caller acknowledges the bias. As *values*,
k1 = r and k3 are both unbiased. Source: http://joschu.net/blog/kl-approx.html; the expected gradients are tested by
enumeration.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_finite, check_log_probs, check_mask, check_shape, check_temperature
from opd.maths.head_tail import importance_weight, log_ratio, truncation, with_value
from opd.maths.result import Divergence, reduced
from opd.maths.scores import TokenScores, score_tokens

#: Forms of the estimator; the last two require `acknowledge_bias`.
FORMS = ("policy_gradient", "k2", "k1_loss", "k3_loss")
_BIASED = {
    "k1_loss": "its expected gradient is exactly zero",
    "k3_loss": "its expected gradient is that of the forward KL",
}


def sampled_reverse_kl(
    student: Float[Tensor, "*N V"] | TokenScores,
    sampled_ids: Int[Tensor, "*N"],
    teacher_sampled: Float[Tensor, "*N"],
    *,
    form: str = "policy_gradient",
    control_variate: Float[Tensor, "*N"] | None = None,
    mask: Bool[Tensor, "*N"] | None = None,
    temperature: float = 1.0,
    behaviour_log_probs: Float[Tensor, "*N"] | None = None,
    importance_cap: float | None = None,
    acknowledge_bias: bool = False,
    check_values: bool | None = None,
) -> Divergence:
    """KL(student || teacher) from both models' log-probs of the sampled token.

    Args:
        student: [..., V] logits with gradient, or their scores at `sampled_ids`.
        sampled_ids: [...] the token y that was sampled.
        teacher_sampled: [...] the teacher's log-prob of y at `temperature`.
        form: "policy_gradient" or "k2"; with `acknowledge_bias` also "k1_loss" or "k3_loss".
        control_variate: [...] b in nats, which must not depend on y: for example the KL at the position, exact or over
            a top-k head (vOPD, arXiv 2605.07865). For policy_gradient only.
        mask: [...] bool, True where a token counts.
        temperature: divides the student's logits; not applied to ready scores. y must have been sampled at the same
            one.
        behaviour_log_probs: [...] log mu(y) of the policy that sampled y: terms are weighted by w = p(y) / mu(y).
        importance_cap: upper bound on w; the gradient is biased where w exceeds it. None for no cap.
        acknowledge_bias: allow the biased forms.
        check_values: whether to refuse invalid values; by default on CPU only.

    Returns:
        `per_token` has the values of w r (k2: w r^2 / 2, k3_loss: w k3) in nats and the gradient of the form. Both are
        infinite or NaN where the teacher excludes y. Diagnostics: log_ratio (r), importance_weight and, with a cap,
        importance_truncated (1 where w is at the cap). Overlap, covered mass and tails cannot be known from one token.

    Raises:
        ValueError: if a shape, a dtype, an id or a setting is not valid, or a biased form is not acknowledged.
    """
    _check_form(form, acknowledge_bias, control_variate is not None)
    check_temperature(temperature)
    if not isinstance(student, TokenScores):
        student = score_tokens(
            student, sampled_ids=sampled_ids, temperature=temperature, mask=mask, check_values=check_values
        )
    log_p = student.sampled
    check_shape("sampled_ids", sampled_ids, tuple(log_p.shape), "the student's scores")
    check_shape("teacher_sampled", teacher_sampled, tuple(log_p.shape), "sampled_ids")
    check_mask("mask", mask, tuple(log_p.shape), "sampled_ids")
    # Not normalised: targets that a reference has adjusted are log-weights, which may exceed 0 (`opd.maths.reference`).
    check_log_probs("teacher_sampled", teacher_sampled, mask, check_values, normalised=False)
    ratio = log_ratio(log_p, teacher_sampled, mask)
    weight = importance_weight(log_p, behaviour_log_probs, importance_cap, mask, check_values)
    # The teacher has no gradient, so the gradient of the ratio is that of log p.
    live_ratio = with_value(log_p, ratio)
    if form == "policy_gradient":
        advantage = ratio
        if control_variate is not None:
            check_shape("control_variate", control_variate, tuple(log_p.shape), "sampled_ids")
            check_finite("control_variate", control_variate, mask, check_values)
            control_variate = control_variate.detach()
            advantage = ratio - (control_variate if mask is None else torch.where(mask, control_variate, 0.0))
        # The control variate changes the variance of the gradient, not the reported estimate of the KL.
        per_token = with_value(weight * advantage * log_p, weight * ratio)
    elif form == "k2":
        per_token = 0.5 * weight * live_ratio.square()
    elif form == "k1_loss":
        per_token = weight * live_ratio
    else:
        # q/p - 1 + r with q/p = e^-r: near r = 0 a difference of nearly equal numbers, where expm1 avoids the rounding
        # error.
        per_token = weight * (torch.expm1(-live_ratio) + live_ratio)
    return reduced(
        per_token,
        mask,
        student_entropy=student.entropy,
        diagnostics={"log_ratio": ratio, "importance_weight": weight} | truncation(weight, importance_cap),
    )


def _check_form(form: str, acknowledge_bias: bool, has_control_variate: bool) -> None:
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, but is {form!r}.")
    if form in _BIASED and not acknowledge_bias:
        raise ValueError(
            f"form {form!r} is biased as a loss for the reverse KL: {_BIASED[form]}; use 'policy_gradient' or 'k2', "
            "or pass acknowledge_bias=True."
        )
    if has_control_variate and form != "policy_gradient":
        raise ValueError(f"control_variate applies to form 'policy_gradient' only, but form is {form!r}.")
