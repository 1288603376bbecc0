"""Statistics and gradient of a divergence for a few rows of logits: the torch twin of the Triton kernels.

Works in place on blocks small enough for the cache (`opd.maths.blocks`) and does not depend on where the logits come
from, so the exact divergences and the tiled linear ones share it.
"""

from enum import IntEnum

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.pointwise import Kind, Spec, term_and_slope


class Statistic(IntEnum):
    """Rows of a statistics tensor [5, n]; in nats at the given temperature, before `Spec.scale`."""

    STUDENT_LOG_Z = 0
    TEACHER_LOG_Z = 1
    VALUE = 2
    STUDENT_ENTROPY = 3
    TEACHER_ENTROPY = 4


def fold_rows_(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    spec: Spec,
    temperature: float,
    *,
    soft_cap: float = 0.0,
    factor: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "5 n"]:
    """Statistics of each row in the order of `Statistic`, and optionally the gradient; overwrites both arguments.

    Args:
        student: logits in the accumulator's dtype. With a factor, they become `factor` times the gradient of the
            divergence, before `Spec.scale`, with respect to the logits / temperature (through the soft-cap, if there is
            one).
        teacher: logits; on return their contents are undefined.
        spec: the divergence; its scale is not applied.
        temperature: divides the logits.
        soft_cap: soft-cap that was applied to the student's logits, through which the gradient is taken; 0 for none.
        factor: [n] factor of each row's gradient; None for no gradient.
    """
    slack = None
    if soft_cap and factor is not None:  # the derivative of tanh, from the capped logits
        slack = 1.0 - (student / soft_cap).square_()
    p, our_log_z = _normalise_(student, temperature)
    q, their_log_z = _normalise_(teacher, temperature)
    ours, theirs = -_dot(p, student), -_dot(q, teacher)
    # An excluded entry makes the entropy NaN (0 * -inf). Looking for one would make an accelerator wait and break a
    # compiled graph, so there every row takes the careful path.
    careful = student.device.type != "cpu" or torch.compiler.is_compiling() or bool((ours + theirs).isnan().any())
    if careful:
        ours, theirs = _entropy(p, student), _entropy(q, teacher)
    if careful or spec.kind not in (Kind.FORWARD_KL, Kind.REVERSE_KL):
        value = _fold_any_(student, teacher, p, q, spec, factor)
    else:
        value = _fold_kl_(student, teacher, p, q, spec.kind is Kind.FORWARD_KL, factor)
    if slack is not None:
        student *= slack
    return torch.stack([our_log_z, their_log_z, value, ours, theirs])


def _normalise_(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Turns logits into log-probs in place; returns probabilities and the log-normalisers."""
    if temperature != 1.0:
        logits /= temperature
    # Subtract the largest logit first: no exponential overflows, and the sum is at least 1.
    highest = logits.amax(-1, keepdim=True)
    logits -= highest
    p = logits.exp()
    total = p.sum(-1, keepdim=True)
    log_total = total.log()
    logits -= log_total
    p /= total
    return p, (highest + log_total).squeeze(-1)


def _fold_kl_(
    log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, forward: bool, factor: Tensor | None
) -> Float[Tensor, " n"]:
    """The two KLs, for rows without excluded entries, in as few sweeps as possible."""
    # Written to the memory of log q, which is not needed any more.
    log_ratio = torch.sub(log_p, log_q, out=log_q)
    value = -_dot(q, log_ratio) if forward else _dot(p, log_ratio)
    if factor is not None and forward:
        torch.sub(p, q, out=log_p).mul_(factor.unsqueeze(-1))
    elif factor is not None:
        # The mean is subtracted twice. Where the student is nearly certain of an entry, its log-ratio minus the mean is
        # nothing but the rounding error of the mean; the second mean is of numbers as small as the gradient, and
        # removes it.
        log_ratio -= value.unsqueeze(-1)
        log_ratio -= _dot(p, log_ratio).unsqueeze(-1)
        p *= factor.unsqueeze(-1)
        torch.mul(p, log_ratio, out=log_p)
    return value


def _fold_any_(
    log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor, spec: Spec, factor: Tensor | None
) -> Float[Tensor, " n"]:
    """Any divergence, from its definition; excluded entries are allowed."""
    term, slope = term_and_slope(spec, log_p, log_q, p, q)
    if factor is not None:
        # Through the softmax: d logit_i = slope_i - p_i * (sum of all slopes).
        gradient = torch.addcmul(slope, p, slope.sum(-1, keepdim=True), value=-1.0)
        torch.mul(gradient, factor.unsqueeze(-1), out=log_p)
    return term.sum(-1)


def _dot(left: Tensor, right: Tensor) -> Float[Tensor, " n"]:
    """Row-wise dot product in full precision: autocast would round its inputs."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.linalg.vecdot(left, right)


def _entropy(p: Tensor, log_p: Tensor) -> Float[Tensor, " n"]:
    # 0 times the lowest finite number is 0, as the entropy requires; 0 * -inf would be NaN.
    return -_dot(p, log_p.clamp(min=torch.finfo(log_p.dtype).min))


def log_probs(logits: Float[Tensor, "n V"], log_z: Float[Tensor, " n"], temperature: float) -> Float[Tensor, "n V"]:
    """Log-probs from logits and their logsumexp at this temperature: a new tensor in the dtype of `log_z`."""
    if temperature == 1.0:
        return logits.to(log_z.dtype) - log_z.unsqueeze(-1)
    return logits.to(log_z.dtype, copy=True).div_(temperature).sub_(log_z.unsqueeze(-1))


def entropy(log_probs: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """Entropy of each row of log-probs in nats; entries of -inf contribute nothing."""
    return _entropy(log_probs.exp(), log_probs)
