"""From a divergence of `opd.maths` to what a term returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from opd.maths import Divergence

    Metrics = dict[str, tuple[Tensor | float, Tensor | float]]


def divergence_metrics(name: str, result: Divergence) -> Metrics:
    """Metrics of a divergence as (sum, count): its value as `name`, entropies, diagnostics."""
    metrics: Metrics = {name: (result.per_token.detach().sum(), result.count)}
    for label, values in (("student_entropy", result.student_entropy), ("teacher_entropy", result.teacher_entropy)):
        if values is not None:
            metrics[label] = (values.sum(), result.count)
    return metrics | {label: (values.sum(), result.count) for label, values in result.diagnostics.items()}
