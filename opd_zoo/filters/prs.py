"""PRS (Dr.Kernel): rejects most correct turns that spend little of their run time in the student's own kernels.

    a correct turn is kept with probability clip((coverage - threshold) / width, 0, 1); other turns are always kept

Coverage is the share of the profiled time spent in those kernels. With `speedup`, a correct turn that reaches this
speed-up is kept whatever its coverage. The environment measures each turn, as for reward `profiling`. A turn that is
not kept leaves the loss and the means over tokens; its return still counts in the statistics of its group, and the
other turns of its episode are learnt from as before. Source: the released code of arXiv 2602.05885
(hkust-nlp/KernelGYM, read): threshold 0.3, width 0.1, time coverage, no speed-up. Whether rejected turns also leave the
group's statistics there was not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd_zoo.rewards.profiling import measured
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from student.data.row import Row
    from student.plugin.controllers import Services

_RIGHT, _DROPPED = "prs/correct", "prs/dropped"


class PrsSettings(ControllerSettings):
    """Settings of PRS."""

    threshold: float = Field(0.3, ge=0, le=1, description="Coverage up to which correct turns are always dropped.")
    width: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Width of the range of coverage above it over which the probability of keeping them rises to 1.",
    )
    speedup: float | None = Field(
        None, gt=0, description="Speed-up from which a correct turn is kept whatever its coverage; null means never."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of turns.")


class Prs(Controller[PrsSettings]):
    """Drops most correct turns whose own code takes little of the run time (Dr.Kernel's PRS)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(works_ahead=True)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mask rejected turns out of the loss; a row with no turn left is not trained on."""
        for row in rows:
            for turn, (start, end) in enumerate(row.turns):
                found = measured(row, turn)
                if found.get("correct", 0.0) <= 0:
                    continue
                key = row.key
                u = float(stream(self.settings.seed, "prs", key.step, key.uid, key.sample, turn).random())
                kept = u < self.chance(found)
                row.notes[_RIGHT] = row.notes.get(_RIGHT, 0.0) + 1.0
                row.notes[_DROPPED] = row.notes.get(_DROPPED, 0.0) + (not kept)
                if not kept:
                    row.loss_mask[start:end] = False
            row.trained = row.trained and bool(row.loss_mask.any())
        return rows

    def chance(self, found: Mapping[str, float]) -> float:
        """Probability of keeping a correct turn with these measures."""
        s = self.settings
        if s.speedup is not None and found.get("speedup", 0.0) >= s.speedup:
            return 1.0
        return min(1.0, max(0.0, (found.get("coverage", 0.0) - s.threshold) / s.width))

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics prs/correct (correct turns per episode) and prs/dropped (the share of them that was rejected)."""
        told = [outcome.notes for outcome in services.outcomes if _RIGHT in outcome.notes]
        right = sum(notes[_RIGHT] for notes in told)
        if not right:
            return {}
        dropped = sum(notes[_DROPPED] for notes in told)
        return {_RIGHT: right / len(services.outcomes), _DROPPED: dropped / right}
