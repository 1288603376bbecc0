"""NGRPO's advantage: virtual rows with the best reward join every group, so that all-wrong groups are learnt from.

    A_i = (r_i - mean') / (std' + epsilon),   mean' and std' over r_1 ... r_n and `count` times `best`

All-right groups get 0; the answers of all-wrong groups are pushed down, so the credit does not add up to 0. The authors
clip asymmetrically: clip_low 0.16, clip_high 0.24. Source: the released code of arXiv 2509.18851, nangongrui-ngr/NGRPO.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from opd_zoo.deviation import deviation
from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence


class NgrpoSettings(AdvantageSettings):
    """Settings of NGRPO."""

    best: float = Field(1.0, description="Reward of the virtual rows, the best one possible.")
    count: int = Field(1, ge=0, description="Number of virtual rows in a group; 0 is GRPO.")
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")


class Ngrpo(GroupEstimator[NgrpoSettings]):
    """GRPO with virtual rows of the best reward: all-wrong groups are learnt from."""

    evidence = "text and code"
    traits = Traits(least_group=2, learns_from_equal=True)

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula; groups of one get 0."""
        every = [*rewards, *[self.settings.best] * self.settings.count]
        spread = deviation(every, 1)
        if len(rewards) < 2 or spread == 0.0:
            return [0.0] * len(rewards)
        mean = math.fsum(every) / len(every)
        return [(reward - mean) / (spread + self.settings.epsilon) for reward in rewards]
