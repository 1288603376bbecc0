"""GC-OPD: a teacher's reward per token, shifted where teacher and verifier rank the answers of a group differently.

    d_t    log T(y_t) - log mu(y_t), mu the policy that sampled;   s_i the mean of d over answer i
    rho_i  z(r)_i - z(s)_i,   z by the mean and population deviation of the group; 0 where either deviation is
    c_t    1 + tanh(u_t / 2), u_t = (d_t - s_i) / std d of the answer;   1 where that deviation is 0
    A_t    clip(d_t + beta rho_i c_t, -bound, bound)

It is distillation corrected by a verifier: with beta 0, or equal rewards in a group, A_t = d_t. Use it with objective
policy_gradient and no clip, or with the authors' cap of 5 on the ratio (objective cispo). As published, the tanh gives
tokens that the teacher likes a larger share of a negative rho too. Sources: arXiv 2608.19181 and the released code,
SolereZhang/GC-OPD; beta and bound are its scripts' (the functions' defaults differ).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadSpec
from opd_zoo.deviation import deviation
from student.data.needs import TEACHER, Needs, SignalNeed
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known, teacher_gaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from student.data.outcome import Outcome
    from student.data.row import Row

_LEAST = 1e-6
"""Deviations up to this count as 0."""


class GcOpdSettings(AdvantageSettings):
    """Settings of GC-OPD."""

    beta: float = Field(
        0.1,
        ge=0,
        description="Weight of the correction where teacher and verifier rank answers differently; 0 is distillation "
        "alone.",
    )
    bound: float = Field(10.0, gt=0, description="Largest absolute credit of a token.")


class GcOpd(Advantage[GcOpdSettings]):
    """A teacher's log-ratio per token, corrected where teacher and verifier rank answers differently (GC-OPD)."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True, shift_free="group", scale_free="group", reads=("behaviour",))

    def needs(self) -> Needs:
        """The teacher's log-probs of the response tokens."""
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """The shift rho of each row; metric disagreement is the mean |rho|, 0 where this is distillation alone."""
        found: list[Credit] = [0.0] * len(outcomes)
        for places in self.groups(outcomes):
            mine = [outcomes[place] for place in places]
            scores = [(o.sums[TEACHER] - o.sums["behaviour"]) / max(1, o.tokens) for o in mine]
            both = _standardised([known(o) for o in mine]), _standardised(scores)
            for place, right, liked in zip(places, *both, strict=True):
                found[place] = (right - liked) if any(both[0]) and any(both[1]) else 0.0
        self.fired = {"disagreement": (math.fsum(abs(float(np.mean(rho))) for rho in found), float(len(found)))}
        return found

    def refine(self, row: Row, credit: Credit) -> Credit:
        """[T] float32 A of each token; 0 where it is not trained on."""
        mask, found, gaps = row.loss_mask, np.zeros(row.length), teacher_gaps(row)
        found[mask] = self.by_token(gaps, float(np.mean(credit)))
        return found.astype(np.float32)

    def by_token(self, gaps: NDArray[np.float64], rho: float) -> NDArray[np.float64]:
        """A of each token, from d and the answer's rho, both in float64."""
        width = float(gaps.std()) if len(gaps) > 1 else 0.0
        share = 1.0 + np.tanh((gaps - gaps.mean()) / width / 2.0) if width > _LEAST else np.ones(len(gaps))
        found: NDArray[np.float64] = (gaps + self.settings.beta * rho * share).clip(
            -self.settings.bound, self.settings.bound
        )
        return found


def _standardised(values: Sequence[float]) -> list[float]:
    """Values minus their mean, over their population deviation; zeros where that is 0."""
    width, mean = deviation(values, 0), math.fsum(values) / len(values)
    return [(value - mean) / width if width > _LEAST else 0.0 for value in values]
