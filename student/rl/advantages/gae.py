"""GAE: credit per token from rewards and a critic's values.

    delta_t = r_t + discount V_{t+1} - V_t,   V = 0 after the end
    A_t = delta_t + discount lam_gae A_{t+1}

r_t is the row's reward at its last trained token, plus `row.token_rewards` where a reward gives them; tokens that are
not trained on are skipped. Values are method critic's; a row without values has V = 0, so that with lambda 1 A is the
discounted return. Nothing is standardised, because no rank sees the tokens of the others. Source: arXiv 1506.02438.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, Credit, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row


class GaeSettings(AdvantageSettings):
    """Settings of GAE."""

    discount: float = Field(1.0, gt=0, le=1, description="gamma, by which a reward is discounted per token.")
    lam_gae: float = Field(
        0.95, ge=0, le=1, description="lambda; 1 uses the full return minus V, 0 the one-step error."
    )


class Gae(GroupEstimator[GaeSettings]):
    """Credit per token from a critic's values (GAE)."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True, reads=("values", "token_rewards"))

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """The rewards themselves; `refine` makes credit per token."""
        return list(rewards)

    def refine(self, row: Row, credit: Credit) -> Credit:
        """[T] float32 A of each token; 0 where it is not trained on."""
        return credit_of(row, float(np.mean(credit)), self.settings.discount, self.settings.lam_gae)


def credit_of(row: Row, reward: float, discount: float, lam: float) -> NDArray[np.float32]:
    """[T] float32 A of each token of a row with this reward; 0 where it is not trained on."""
    places = np.flatnonzero(row.loss_mask)
    found = np.zeros(row.length, np.float32)
    values = np.zeros(row.length) if (v := row.critic.values) is None else v.astype(np.float64)
    gains = np.zeros(row.length) if row.token_rewards is None else row.token_rewards.astype(np.float64)
    # Backwards over trained tokens alone: tokens of the environment are not steps of the policy, so neither discount
    # nor lambda counts them.
    later, after = 0.0, 0.0
    for number, place in enumerate(places[::-1]):
        gain = gains[place] + (reward if number == 0 else 0.0)
        delta = gain + discount * after - values[place]
        later = delta + discount * lam * later
        found[place], after = later, values[place]
    return found


def returns_of(row: Row, credit: NDArray[np.float32]) -> NDArray[np.float32]:
    """[T] float32 targets of the critic, A + V (the lambda-return)."""
    return credit if row.critic.values is None else credit + row.critic.values
