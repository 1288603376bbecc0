"""REINFORCE's advantage: the reward minus a constant.

    A_i = r_i - baseline

Unbiased for every baseline, with a large variance. Groups whose rewards all agree are learnt from too.
Source: Williams, 1992.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence


class ReinforceSettings(AdvantageSettings):
    """Settings of the constant baseline."""

    baseline: float = Field(0.0, description="Constant subtracted from every reward.")


class Reinforce(GroupEstimator[ReinforceSettings]):
    """Reward minus a constant."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True)

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward."""
        return [reward - self.settings.baseline for reward in rewards]
