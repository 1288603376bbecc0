"""Rewards by token, which advantage gae sums: PPO's KL in the reward, and RTO's reward from a DPO model.

    kl_penalty   r_t -= beta (log mu(y_t) - log pi_ref(y_t))
    rto          r_t += clip(beta (log pi_dpo(y_t) - log pi_ref(y_t)), -bound, bound)

mu is the policy that sampled, pi_ref the model of `teachers.reference`, and the DPO model is the teacher. Both add to
the row's other reward, which counts at its last token. An advantage that does not read rewards by token would ignore
them, so it is refused. Sources: the KL, arXiv 1909.08593; RTO, 2404.18922 and the released code, zkshan2002/RTO (beta
0.05, bound 0.05).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadSpec
from student.data.needs import REFERENCE, TEACHER, Needs, SignalNeed
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, RewardSettings_co

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class TokenRewards(Reward[RewardSettings_co]):
    """Base of rewards by token: subclasses give `tokens` of a row."""

    by_group = False
    roles: tuple[str, ...] = ()
    """Models whose log-probs of the response tokens it reads."""
    traits = Traits(gives=("token_rewards",))

    def needs(self) -> Needs:
        """The log-probs of the roles; no verdicts."""
        return Needs(signals=tuple(SignalNeed(role, PayloadSpec.sampled()) for role in self.roles))

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Add to `row.token_rewards`; rows that the student did not sample are skipped."""
        for row in rows:
            if not np.isfinite(row.behaviour_logp[row.loss_mask]).all():
                continue  # the student did not sample it
            # Tokens of the environment are not the student's choice and earn nothing.
            found = np.where(row.loss_mask, self.tokens(row), 0.0).astype(np.float32)
            row.token_rewards = found if row.token_rewards is None else row.token_rewards + found
            self.fire("by_token", float(found.sum()), float(row.loss_mask.sum()))

    def tokens(self, row: Row) -> NDArray[np.float32]:
        """[T] the reward of each token; any value where the token is not trained on."""
        raise TypeError(f"{type(self).__name__} does not implement tokens")


def log_probs(row: Row, role: str) -> NDArray[np.float32]:
    """[T] float32 log-probs of the response tokens under a role, nats."""
    return np.asarray(row.log_probs(role), np.float32)


class KlPenaltySettings(RewardSettings):
    """Settings of the KL in the reward."""

    beta: float = Field(0.05, gt=0, description="Penalty per nat of the log-ratio to the reference.")


class KlPenalty(TokenRewards[KlPenaltySettings]):
    """Per token: minus the log-ratio to the reference (PPO's KL in the reward)."""

    evidence = "text and code"
    roles = (REFERENCE,)

    def tokens(self, row: Row) -> NDArray[np.float32]:
        """[T] minus beta times the log-ratio of the sampling policy to the reference."""
        return -self.settings.beta * (row.behaviour_logp - log_probs(row, REFERENCE))


class RtoSettings(RewardSettings):
    """Settings of RTO."""

    beta: float = Field(0.05, gt=0, description="Factor of the DPO model's log-ratio.")
    bound: float = Field(0.05, gt=0, description="Largest absolute reward of a token.")


class Rto(TokenRewards[RtoSettings]):
    """Per token: the log-ratio of a DPO model to the reference (RTO)."""

    evidence = "text and code"
    roles = (TEACHER, REFERENCE)

    def tokens(self, row: Row) -> NDArray[np.float32]:
        """[T] the clipped reward; metric clipped, a share of the tokens."""
        found = self.settings.beta * (log_probs(row, TEACHER) - log_probs(row, REFERENCE))
        bound, mask = self.settings.bound, row.loss_mask
        self.fire("clipped", float((np.abs(found[mask]) > bound).sum()), float(mask.sum()))
        return found.clip(-bound, bound)
