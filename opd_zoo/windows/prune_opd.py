"""Prune-OPD (arXiv 2605.07804): end responses where the student has drifted away from the teacher.

Drift is measured by the top-k sets of both at each position t,

    overlap_t = |top-k of S  and  top-k of T| / k,

as a running mean over `smoothing` tokens. A row's drift point is the first position at which that mean falls below
`threshold`. Tokens after it are not trained on, and the next step's window is `growth` times the quantile `quantile` of
the drift points, so that it can grow again once rows do not drift. The full text was not available to us. It is known
that top-k overlap decides where to cut and what to down-weight; the running mean, the quantile and the growth are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.methods.windows.windows import FollowingController
from student.plugin.controllers import ControllerSettings

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services


class PruneOpdSettings(ControllerSettings):
    """Settings of pruning by overlap."""

    k: int = Field(16, ge=1, le=1024, description="Number k of ids in both top-k sets.")
    threshold: float = Field(
        0.6, gt=0, lt=1, description="Overlap below which a row counts as drifted from the teacher."
    )
    smoothing: int = Field(8, ge=1, description="Number of tokens in the running mean of the overlap.")
    quantile: float = Field(
        0.9, gt=0, le=1, description="Quantile of the rows' drift points from which the next window is set."
    )
    growth: float = Field(1.25, ge=1, description="Ratio of the next window to that quantile.")
    shortest: int = Field(8, ge=1, description="Minimum window in tokens.")


class PruneOpd(FollowingController[PruneOpdSettings]):
    """Ends responses where the student has drifted away from the teacher (Prune-OPD).

    Its state is the window.
    """

    def needs(self) -> Needs:
        """The teacher's top-k, and the student's."""
        spec = PayloadSpec.topk(self.settings.k)
        return Needs(signals=(SignalNeed(TEACHER, spec),), candidates=self.settings.k)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mask the tokens after each row's drift point, and note the point for the next window."""
        for row in rows:
            if row.origin == "expert":  # on given rows, the student's top k says nothing about its own responses
                continue
            places = np.flatnonzero(row.written)
            overlap = self._overlaps(row)[places]  # an environment's tokens do not count as drift
            drift = self._drift_point(overlap)
            point = int(places[drift]) if drift < len(places) else row.length
            # A row that ended by itself without drifting does not speak against a longer window.
            row.notes["drift_point"] = point if point < row.length or row.truncated else self.limit
            row.notes["overlap"] = float(overlap.mean()) if len(overlap) else 1.0
            row.notes["pruned_tokens"] = int(row.loss_mask[point:].sum())
            row.loss_mask[point:] = False
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics window (tokens, of this step), overlap (0 to 1) and pruned_tokens; then the next window applies."""
        found = [outcome.notes for outcome in services.outcomes if "drift_point" in outcome.notes]
        metrics = {"window": float(self.current)}
        if not found:
            return metrics
        s = self.settings
        reach = float(np.quantile([notes["drift_point"] for notes in found], s.quantile)) * s.growth
        self.chosen = min(self.limit, max(s.shortest, round(reach)))
        return metrics | {
            "overlap": float(np.mean([notes["overlap"] for notes in found])),
            "pruned_tokens": sum(notes["pruned_tokens"] for notes in found),
        }

    def _overlaps(self, row: Row) -> np.ndarray:
        """[T] overlap of the top-k sets."""
        signal = row.signals[TEACHER, PayloadKind.TOPK]
        if row.candidates is None or signal.ids is None:
            return np.ones(row.length)
        student, teacher = row.candidates[:, : self.settings.k], signal.ids[:, : self.settings.k]
        return (student[:, :, None] == teacher[:, None, :]).any(-1).mean(-1)

    def _drift_point(self, overlap: np.ndarray) -> int:
        """The first position at which the running mean is below the threshold; the length if there is none."""
        width = self.settings.smoothing
        sums = np.concatenate([[0.0], np.cumsum(overlap)])
        starts = np.maximum(0, np.arange(1, len(overlap) + 1) - width)
        means = (sums[1:] - sums[starts]) / (np.arange(1, len(overlap) + 1) - starts)
        low = np.flatnonzero(means < self.settings.threshold)
        return max(1, int(low[0])) if len(low) else len(overlap)
