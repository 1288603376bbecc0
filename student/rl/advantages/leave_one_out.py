"""RLOO's advantage: the reward minus the mean of the other rewards of the group.

    A_i = r_i - mean_{j != i} r_j

The baseline does not depend on r_i, so the gradient is unbiased. Groups of one, and groups whose rewards all agree, get
0. Source: RLOO, arXiv 2402.14740.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from student.plugin.traits import Traits
from student.rl.advantages.base import GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence


class LeaveOneOut(GroupEstimator):
    """Reward minus the mean of the rest of the group (RLOO)."""

    evidence = "text and code"
    traits = Traits(least_group=2, shift_free="group")

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        # Set explicitly: rounding would give equal rewards such as 0.1 a tiny credit with a sign.
        if len(set(rewards)) <= 1:
            return [0.0] * len(rewards)
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
