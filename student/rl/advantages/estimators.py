"""Advantage estimators: from the rewards of a step's groups to one advantage per row.

Degenerate groups: where all rewards are equal, and in groups of one, every advantage is 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.rl.advantages.groups import Group


class AdvantageSettings(Settings):
    """Settings that every estimator has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


class Advantage:
    """An estimator; sees all groups of the step on this rank, and a group is never split over ranks."""

    settings_type: ClassVar[type[AdvantageSettings]] = AdvantageSettings
    least_group: ClassVar[int] = 1
    """Rows that a group needs for any advantage but 0."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def estimate(self, groups: Sequence[Group]) -> list[list[float]]:
        """One advantage per row, group by group."""
        raise TypeError(f"{type(self).__name__} does not implement estimate")


class GroupMeanSettings(AdvantageSettings):
    """Settings of the group mean."""

    scale: Literal["std", "none"] = Field(
        "std", description="Divide by the group's standard deviation (GRPO) or not (Dr. GRPO)."
    )
    ddof: Literal[0, 1] = Field(
        1, description="Degrees of freedom taken off in the deviation: 1 as public code has it, 0 for a population."
    )
    epsilon: float = Field(1e-6, ge=0, description="Added to the deviation.")


class GroupMean(Advantage):
    """A_i = (r_i - mean r) / (std r + epsilon).

    The mean holds r_i itself, which shrinks the gradient by 1 - 1/n, and the deviation weighs prompts by how much their
    rewards agree: unbiased without it up to that factor. Sources: GRPO, arXiv 2402.03300; Dr. GRPO, 2503.20783.
    """

    settings_type = GroupMeanSettings
    settings: GroupMeanSettings
    least_group = 2

    def estimate(self, groups: Sequence[Group]) -> list[list[float]]:
        """See the class."""
        return [self._group(group.rewards) for group in groups]

    def _group(self, rewards: Sequence[float]) -> list[float]:
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if self.settings.scale == "none":
            return centred
        spread = math.fsum(value * value for value in centred)
        if len(set(rewards)) <= 1:
            return [0.0] * len(rewards)
        deviation = math.sqrt(spread / (len(rewards) - self.settings.ddof))
        return [value / (deviation + self.settings.epsilon) for value in centred]


class LeaveOneOut(Advantage):
    """A_i = r_i - mean of the other rewards of the group: an unbiased baseline, which does not know r_i.

    Source: RLOO, arXiv 2402.14740.
    """

    least_group = 2

    def estimate(self, groups: Sequence[Group]) -> list[list[float]]:
        """See the class."""
        return [self._group(group.rewards) for group in groups]

    def _group(self, rewards: Sequence[float]) -> list[float]:
        if len(rewards) < 2:
            return [0.0] * len(rewards)
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
