"""A few rows of logits at once: their statistics, their gradient. The torch twin of the Triton kernels.

Both work on blocks small enough for the cache (see `opd.maths.blocks`) and know nothing of where logits come from, so
the exact divergences and the tiled linear ones share them.
"""

from enum import IntEnum

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.pointwise import Spec, term_and_slope


class Row(IntEnum):
    """Rows of a statistics tensor [6, n]; everything in nats at the given temperature, before `Spec.scale`."""

    STUDENT_LOG_Z = 0
    TEACHER_LOG_Z = 1
    VALUE = 2
    SLOPE_SUM = 3
    STUDENT_ENTROPY = 4
    TEACHER_ENTROPY = 5


def row_statistics(
    student: Float[Tensor, "n V"], teacher: Float[Tensor, "n V"], spec: Spec, temperature: float, dtype: torch.dtype
) -> Float[Tensor, "6 n"]:
    """Log-normalisers, divergence, sum of slopes and entropies of each row, in the order of `Row`.

    Args:
        student: logits, any float dtype.
        teacher: logits.
        spec: the divergence; its scale is not applied.
        temperature: divides the logits.
        dtype: of the computation and the result.
    """
    log_zs = [torch.logsumexp(logits.to(dtype) / temperature, dim=-1) for logits in (student, teacher)]
    log_p = log_probs(student, log_zs[0], temperature)
    log_q = log_probs(teacher, log_zs[1], temperature)
    term, slope = term_and_slope(spec, log_p, log_q)
    return torch.stack([*log_zs, term.sum(-1), slope.sum(-1), entropy(log_p), entropy(log_q)])


def row_gradient(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    statistics: Float[Tensor, "6 n"],
    spec: Spec,
    temperature: float,
) -> Float[Tensor, "n V"]:
    """Gradient of each row's divergence with respect to logits / temperature, before `Spec.scale`."""
    log_p = log_probs(student, statistics[Row.STUDENT_LOG_Z], temperature)
    log_q = log_probs(teacher, statistics[Row.TEACHER_LOG_Z], temperature)
    slope = term_and_slope(spec, log_p, log_q)[1]
    return slope - log_p.exp_().mul_(statistics[Row.SLOPE_SUM].unsqueeze(-1))


def log_probs(logits: Float[Tensor, "n V"], log_z: Float[Tensor, " n"], temperature: float) -> Float[Tensor, "n V"]:
    """Log-probs from logits and their logsumexp at this temperature, a new tensor in the dtype of `log_z`."""
    return logits.to(log_z.dtype, copy=True).div_(temperature).sub_(log_z.unsqueeze(-1))


def entropy(log_probs: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """Entropy of each row of log-probs, nats; entries of -inf contribute nothing."""
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
