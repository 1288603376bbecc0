"""The reward minus a critic's value of the prompt: a baseline for single answers, and A-LoL's filter.

    A_i = r_i - V(x_i),   V(x) method critic's value before the first token

With `keep: positive`, answers that are no better than the value of their prompt are left out of the loss and its means
(A-LoL), and metric known_share shows how many remain. Before the critic's first fit V is 0. Sources: A-LoL, arXiv
2305.14718, and the released code, abaheti95/LoL-RL; the baseline by itself is REINFORCE's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, Credit, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row


class PromptValueSettings(AdvantageSettings):
    """Settings of the baseline."""

    keep: Literal["all", "positive"] = Field(
        "all", description="Learn from all answers, or only from those with A > 0 (positive)."
    )


class PromptValue(GroupEstimator[PromptValueSettings]):
    """Reward minus a critic's value of the prompt (A-LoL)."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True, reads=("values",))

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """The rewards themselves; `refine` subtracts the value."""
        return list(rewards)

    def refine(self, row: Row, credit: Credit) -> Credit | None:
        """The reward minus V; None for an answer that `keep` leaves out."""
        # With a cut history, tokens that were replayed before the first window have no value.
        first = row.sequences[0][1]
        value = 0.0 if row.critic.values is None or not row.length else float(row.critic.values[first])
        found = float(np.mean(credit)) - value
        return None if self.settings.keep == "positive" and found <= 0 else found
