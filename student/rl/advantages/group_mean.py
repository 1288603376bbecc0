"""GRPO's advantage: the reward minus the group's mean, by default over the group's deviation.

    A_i = (r_i - mean r) / (std r + epsilon)

The mean includes r_i itself, which scales the gradient by 1 - 1/n. Dividing by the deviation weighs prompts by how much
their rewards agree; without it the gradient is unbiased up to that factor. Groups of one, and groups whose rewards all
agree, get 0. Sources: GRPO, arXiv 2402.03300; without the deviation Dr. GRPO, 2503.20783.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence


class GroupMeanSettings(AdvantageSettings):
    """Settings of the group mean."""

    scale: Literal["std", "none"] = Field(
        "std", description="Divide by the group's standard deviation (std, as in GRPO) or not (none, as in Dr. GRPO)."
    )
    ddof: Literal[0, 1] = Field(
        1,
        description="Degrees of freedom subtracted in the deviation: 1 as in public code, 0 for that of a population.",
    )
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")


class GroupMean(GroupEstimator[GroupMeanSettings]):
    """Reward minus the group's mean, by default divided by its deviation (GRPO)."""

    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(least_group=2, shift_free="group", scale_free="group" if self.settings.scale == "std" else "")

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        # Set explicitly: the rounded mean of three times 0.1 is not 0.1, and strata would read the sign of the rest.
        if len(set(rewards)) <= 1:
            return [0.0] * len(rewards)
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if self.settings.scale == "none":
            return centred
        spread = math.fsum(value * value for value in centred)
        deviation = math.sqrt(spread / (len(rewards) - self.settings.ddof))
        return [value / (deviation + self.settings.epsilon) for value in centred]
