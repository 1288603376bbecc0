"""ArCHer's credit: every token of a turn has the turn's advantage, as method archer_critic values it.

    A_k = min_j Q_j(s_k, a_k) - min_j V_j(s_k)                 0 before the critic's first fit

The policy gradient is then the sum over turns of A_k grad log pi(a_k | s_k): `ratio: none`, as in the released code.
The paper's optional learnt baseline per token is not built. Source: arXiv 2402.19446; YifeiZhou02/ArCHer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from student.plugin.traits import Traits
from student.rl.advantages.base import Credit, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row


class OfTurnCritic(GroupEstimator):
    """Base of estimators that take the credit which a critic of turns has written into the row.

    Attributes:
        critic: the critic's class.
        source: what the critic gives, and this advantage reads.
    """

    critic: ClassVar[str]
    source: ClassVar[str]

    @property
    def traits(self) -> Traits:
        add = f"add method {self.source.removesuffix('_values')}_critic"
        return Traits(learns_from_equal=True, reads=(self.source,), why={"reads": add})

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
    source = "archer_values"
