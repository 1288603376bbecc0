"""MRS: answers on which sampler and trainer disagree too much are not learnt from.

    g = exp(mean over the tokens of log pi_old(y_t) - log mu(y_t))
    an answer is learnt from if low <= g <= high and no token has pi_old / mu below `veto`

pi_old is the student when the rows were scored, mu the engine that sampled: they differ by the engine's numerics, by
a lag, or by a hint. Answers that are left out still count in the statistics of their group. The authors also weigh
the rest by the ratio up to 2, which is objective minirl's `cap`. Source: the released code of Dr.Kernel, arXiv
2602.05885, hkust-nlp/KernelGYM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadSpec
from student.data.needs import STUDENT, Needs, SignalNeed
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services

_MEAN, _OUT, _VETO = "mrs/mean_ratio", "mrs/rejected", "mrs/vetoed"


class MrsSettings(ControllerSettings):
    """Settings of MRS."""

    low: float = Field(0.999, ge=0, le=1, description="Minimum geometric mean of the ratio over an answer.")
    high: float = Field(1.001, ge=1, description="Maximum geometric mean of the ratio over an answer.")
    veto: float = Field(1e-4, ge=0, lt=1, description="Ratio below which a single token excludes its answer.")


class Mrs(Controller[MrsSettings]):
    """Leaves out answers on which sampler and trainer disagree (MRS)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(wants_mismatch=True)

    def needs(self) -> Needs:
        """The student's log-probs when the rows were scored."""
        return Needs(signals=(SignalNeed(STUDENT, PayloadSpec.sampled()),))

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mark what is not learnt from; answers that the student did not sample are passed over."""
        for row in rows:
            found = row.log_probs(STUDENT)
            mask = row.loss_mask
            if found is None or not mask.any() or not np.isfinite(row.behaviour_logp[mask]).all():
                continue
            gaps = found[mask].astype(np.float64) - row.behaviour_logp[mask]
            mean = float(np.exp(gaps.mean()))
            vetoed = bool((np.exp(gaps) < self.settings.veto).any())
            out = vetoed or not self.settings.low <= mean <= self.settings.high
            row.notes |= {_MEAN: mean, _OUT: float(out), _VETO: float(vetoed)}
            row.trained = row.trained and not out
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics mrs/mean_ratio, and mrs/rejected and mrs/vetoed, shares of the answers looked at."""
        looked = [outcome.notes for outcome in services.outcomes if _OUT in outcome.notes]
        return {name: sum(n[name] for n in looked) / len(looked) for name in (_MEAN, _OUT, _VETO)} if looked else {}
