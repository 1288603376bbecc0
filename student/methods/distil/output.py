"""Helpers between terms and the divergences of `opd.maths`: importance weights as arguments, metrics of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opd import maths

if TYPE_CHECKING:
    from torch import Tensor

    from opd.maths import Divergence
    from student.data.token_batch import TokenBatch

    Metrics = dict[str, tuple[Tensor | float, Tensor | float]]


def weighted(batch: TokenBatch, cap: float | None) -> dict[str, Any]:
    """The arguments that weight an estimate from the sampled token by min(p / behaviour, cap); none without a cap."""
    return {} if cap is None else {"behaviour_log_probs": batch.behaviour_logp, "importance_cap": cap}


def divergence_metrics(name: str, result: Divergence, batch: TokenBatch, mask: Tensor | None = None) -> Metrics:
    """Metrics of a divergence as (sum, count): its value as `name`, entropies, diagnostics, its value by position.

    Args:
        name: name of the divergence.
        result: its result from `opd.maths`, with one value per position of the batch.
        batch: the micro-batch.
        mask: [N] bool, the mask that the result was computed with; the batch's own if None.
    """
    metrics: Metrics = {name: (result.per_token.detach().sum(), result.count)}
    for label, values in (("student_entropy", result.student_entropy), ("teacher_entropy", result.teacher_entropy)):
        if values is not None:
            metrics[label] = (values.sum(), result.count)
    metrics |= {label: (values.sum(), result.count) for label, values in result.diagnostics.items()}
    profile = maths.position_profile(result.per_token, batch.position, mask=batch.mask if mask is None else mask)
    longest = max(row.length for row in batch.rows)
    for bin_, first in enumerate(profile.edges):
        if first < longest:
            metrics[f"by_position/{name}/{first}"] = (profile.total[bin_], profile.count[bin_])
    return metrics
