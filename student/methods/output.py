"""From a divergence of `opd.maths` to what a term returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd import maths

if TYPE_CHECKING:
    from torch import Tensor

    from opd.maths import Divergence

    Metrics = dict[str, tuple[Tensor | float, Tensor | float]]


def divergence_metrics(name: str, result: Divergence, position: Tensor, mask: Tensor) -> Metrics:
    """Metrics of a divergence as (sum, count): its value as `name`, entropies, diagnostics, its value by position.

    Args:
        name: of the divergence.
        result: of `opd.maths`.
        position: [N] index of each token in its response.
        mask: [N] bool, the mask that the result was computed with.
    """
    metrics: Metrics = {name: (result.per_token.detach().sum(), result.count)}
    for label, values in (("student_entropy", result.student_entropy), ("teacher_entropy", result.teacher_entropy)):
        if values is not None:
            metrics[label] = (values.sum(), result.count)
    metrics |= {label: (values.sum(), result.count) for label, values in result.diagnostics.items()}
    profile = maths.position_profile(result.per_token, position, mask=mask)
    for first, total, count in zip(profile.edges, profile.total.tolist(), profile.count.tolist(), strict=True):
        if count:
            metrics[f"by_position/{name}/{first}"] = (total, count)
    return metrics
