"""The result of every divergence and estimator in `opd.maths`, and its reductions over tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """A divergence per token and its reductions, in nats.

    Differentiate `total`, `mean`, or any weighted sum of `per_token`. For an estimator, the values estimate the
    divergence and the gradient is the estimator's; the gradient need not be the derivative of the values.

    Attributes:
        per_token: [...] float32 (float64 for float64 input); 0 with zero gradient where masked.
        total: sum of `per_token`.
        count: number of positions that count, an int64 scalar on the device.
        mean: total / count; 0 if no position counts.
        student_entropy: [...] entropy of the student in nats, detached; None if the payload does not give it.
        teacher_entropy: [...] that of the teacher, likewise.
        diagnostics: further per-token quantities by name, detached; 0 where masked.
    """

    per_token: Float[Tensor, "..."]
    total: Float[Tensor, ""]
    count: Int[Tensor, ""]
    mean: Float[Tensor, ""]
    student_entropy: Float[Tensor, "..."] | None = None
    teacher_entropy: Float[Tensor, "..."] | None = None
    diagnostics: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)


def reduced(
    per_token: Tensor,
    mask: Tensor | None,
    *,
    student_entropy: Tensor | None = None,
    teacher_entropy: Tensor | None = None,
    diagnostics: Mapping[str, Tensor] | None = None,
) -> Divergence:
    """Zeroes masked positions and computes the reductions, without waiting for the device.

    Args:
        per_token: [...] nats. Masked entries may hold anything, but their gradient must be finite.
        mask: [...] bool, True where a token counts; None if all do.
        student_entropy: [...] or None.
        teacher_entropy: [...] or None.
        diagnostics: per-token quantities; they are detached here.
    """

    def masked(values: Tensor) -> Tensor:
        return values if mask is None else torch.where(mask, values, torch.zeros_like(values))

    per_token = masked(per_token)
    if mask is None:
        # Filled on the device: torch.tensor(number, device=...) would copy from the host and wait.
        count = torch.full((), per_token.numel(), dtype=torch.int64, device=per_token.device)
    else:
        count = mask.sum()
    total = per_token.sum()
    return Divergence(
        per_token=per_token,
        total=total,
        count=count,
        # 0 if no position counts, instead of 0 / 0.
        mean=total / count.clamp(min=1),
        student_entropy=None if student_entropy is None else masked(student_entropy.detach()),
        teacher_entropy=None if teacher_entropy is None else masked(teacher_entropy.detach()),
        diagnostics={name: masked(values.detach()) for name, values in (diagnostics or {}).items()},
    )
