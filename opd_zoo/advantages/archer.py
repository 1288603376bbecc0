"""ArCHer's credit: every token of a turn has the turn's advantage, as method archer_critic values it.

    A_k = min_j Q_j(s_k, a_k) - min_j V_j(s_k)                 0 before the critic's first fit

The policy gradient is then the sum over turns of A_k grad log pi(a_k | s_k): `ratio: none`, as in the released code.
The paper's optional learnt baseline per token is not built. Source: arXiv 2402.19446; YifeiZhou02/ArCHer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from opd.errors import ConfigError
from student.rl.advantages.base import Credit, GroupEstimator
from student.rl.advantages.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class OfTurnCritic(GroupEstimator):
    """Base of estimators that take the credit which a critic of turns has written into the row.

    Attributes:
        critic: the critic's class.
        method: its registered name.
    """

    critic: ClassVar[str]
    method: ClassVar[str]

    def traits(self) -> Traits:
        """See `Advantage.traits`."""
        return Traits(learns_from_equal=True)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a recipe without the critic.

        Raises:
            ConfigError: naming the method to add.
        """
        names = (self.method, self.critic)
        if not any(str(entry.get("name", "")).rpartition(":")[2] in names for entry in recipe.methods):
            raise ConfigError(f"advantage {self.settings.name} reads the values of turns; add method {self.method}.")

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """The rewards themselves; `refine` replaces them by the critic's credit."""
        return list(rewards)

    def refine(self, row: Row, credit: Credit) -> Credit:
        """[T] float32 credit per token; zeros where the critic has written none."""
        found = row.critic.credit.get(self.critic)
        return np.zeros(row.length, np.float32) if found is None else found


class Archer(OfTurnCritic):
    """The advantage of each turn, from the values of method archer_critic (ArCHer)."""

    evidence = "abstract"
    critic = "ArcherCritic"
    method = "archer_critic"
