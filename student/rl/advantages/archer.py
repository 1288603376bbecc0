"""ArCHer's credit: every token of a turn has the advantage of its utterance, as method archer_critic values it.

    A_k = min_j Q_j(s_k, a_k) - min_j V_j(s_k)                 0 before the critic's first fit

The policy's gradient is then sum over turns of A_k grad log pi(a_k | s_k): `ratio: none`, as in the released code. The
baseline by token that it can learn besides is not there. Source: arXiv 2402.19446; YifeiZhou02/ArCHer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from opd.errors import ConfigError
from student.rl.advantages.base import Credit, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.recipe import Recipe


class OfTurnCritic(GroupEstimator):
    """Base: the credit is what a critic of turns has written into the row.

    Attributes:
        critic: the critic's class.
        method: its registered name.
    """

    equal_groups = "learns"
    refines = True
    critic: ClassVar[str]
    method: ClassVar[str]

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe without the critic.

        Raises:
            ConfigError: naming it.
        """
        names = (self.method, self.critic)
        if not any(str(entry.get("name", "")).rpartition(":")[2] in names for entry in recipe.methods):
            raise ConfigError(f"advantage {self.settings.name} reads the values of turns; add method {self.method}.")

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """The rewards themselves: the critic has learnt from them, and the credit is of the row."""
        return list(rewards)

    def refine(self, row: Row, credit: Credit) -> Credit:
        """Credit by token."""
        found = row.critic_credit.get(self.critic)
        return np.zeros(row.length, np.float32) if found is None else found


class Archer(OfTurnCritic):
    """The estimator; see the module for the formula."""

    evidence = "abstract"
    critic = "ArcherCritic"
    method = "archer_critic"
