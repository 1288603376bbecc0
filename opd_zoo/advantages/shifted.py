"""Group baselines other than the mean: those of OPMD and AsymRE.

    opmd       A_i = (r_i - b) / (1 + tau),   b = mean r, or tau log mean exp(r / tau) with `soft`
    asym_re    A_i = r_i - (mean r + delta),  delta < 0 leans towards right answers off policy

Both are meant for ratio none and need no old log-probs. OPMD gives 0 to a group whose rewards all agree; AsymRE gives
it -delta. Sources: AsymRE, arXiv 2506.20520; OPMD as arXiv 2509.24203 has it (REC family); the released code of
Trinity-RFT.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence


class OpmdSettings(AdvantageSettings):
    """Settings of OPMD."""

    tau: float = Field(1.0, gt=0, description="Temperature of the mirror descent.")
    soft: bool = Field(
        False, description="Use the soft maximum of the group's rewards as baseline instead of their mean."
    )


class Opmd(GroupEstimator[OpmdSettings]):
    """Reward minus the group's mean or soft maximum, for mirror descent (OPMD)."""

    evidence = "text and code"
    traits = Traits(least_group=2, shift_free="group", off_policy=True)

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        tau, best = self.settings.tau, max(rewards)
        if len(set(rewards)) == 1:
            return [0.0] * len(rewards)
        baseline = math.fsum(rewards) / len(rewards)
        if self.settings.soft:
            total = math.fsum(math.exp((reward - best) / tau) for reward in rewards)
            baseline = best + tau * math.log(total / len(rewards))
        return [(reward - baseline) / (1.0 + tau) for reward in rewards]


class AsymReSettings(AdvantageSettings):
    """Settings of AsymRE."""

    delta: float = Field(-0.1, description="Constant added to the group's mean; below 0 it favours right answers.")


class AsymRe(GroupEstimator[AsymReSettings]):
    """Reward minus a shifted group mean (AsymRE)."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True, shift_free="group", off_policy=True)

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        baseline = math.fsum(rewards) / len(rewards) + self.settings.delta
        return [reward - baseline for reward in rewards]
