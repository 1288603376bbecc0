"""Advantages divided by the deviation of the whole batch, over all ranks: Lite PPO and REINFORCE++.

    lite_ppo         A = (r - mean of the group) / (std of the batch + epsilon)
    reinforce_pp     A = (r - mean of the batch) / (std of the batch + epsilon)

`of` chooses the deviation: that of the raw rewards (Lite PPO as ROLL documents it), or that of the centred ones (DLER's
code). With the group's mean, a group of equal rewards gets exactly 0. Sources: Lite PPO, arXiv 2508.08221; DLER,
2510.15110; REINFORCE++, 2501.03262 (its group baseline is lite_ppo with `of: centred`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd_zoo.deviation import deviation
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class BatchScaleSettings(AdvantageSettings):
    """Settings of the batch's deviation."""

    of: Literal["raw", "centred"] = Field(
        "raw",
        description="Deviation to divide by: that of the raw rewards, or that of the rewards minus their group's mean "
        "(centred).",
    )
    ddof: Literal[0, 1] = Field(1, description="Degrees of freedom subtracted in the deviation.")
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")


class LitePpo(Advantage[BatchScaleSettings]):
    """Reward minus the group's mean, divided by the deviation of the batch (Lite PPO)."""

    evidence = "text"

    @property
    def traits(self) -> Traits:
        return Traits(
            least_group=2, shift_free="group" if self.settings.of == "centred" else "batch", scale_free="batch"
        )

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One advantage per row, by the module's formula."""
        rewards = [known(outcome) for outcome in outcomes]
        found = [0.0] * len(rewards)
        for places in self.groups(outcomes):
            mean = math.fsum(rewards[place] for place in places) / len(places)
            # Exactly 0: rounding would leave a remainder, which a small deviation would blow up.
            equal = len({rewards[place] for place in places}) == 1
            for place in places:
                found[place] = 0.0 if equal else rewards[place] - mean
        divisor = deviation(rewards if self.settings.of == "raw" else found, self.settings.ddof)
        return [value / (divisor + self.settings.epsilon) if value else 0.0 for value in found]


class ReinforcePp(LitePpo):
    """Reward normalised over the whole batch (REINFORCE++)."""

    traits = Traits(learns_from_equal=True, shift_free="batch", scale_free="batch")

    def groups(self, outcomes: Sequence[Outcome]) -> list[list[int]]:
        """The whole batch as one group."""
        return [list(range(len(outcomes)))] if outcomes else []
