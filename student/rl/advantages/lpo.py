"""Credit of losses over a whole group, LPO and PACS: minus the derivative by the log-prob of each response.

    lpo    w = softmax(R / tau), P = 1 / n:   forward KL(w || P)  A_k = w_k - 1 / n
                                              reverse KL(P || w)  A_k = (R_k - mean R) / (n tau)
    pacs   a = psi - mean of the others' psi, psi = beta log(pi / mu);   A = -d/d(psi) of the cross-entropy of a and the
           labels, in which right and wrong answers weigh the same, at psi = 0

Both losses are functions of the log-ratios of the group; here is their credit where those are 0, on rows of the present
policy. With several updates per batch it stays that of the first, which departs from the papers. The loss is
-A sum_t log pi: use ratio none and aggregation constant. tau is a number, or the group's deviation (GRPO to first
order) or mean (MaxRL). Sources: LPO, arXiv 2605.06139 (text); PACS, the released code, ritzz-ai/PACS.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from student.rl.advantages.base import AdvantageSettings, GroupEstimator
from student.rl.advantages.batch_scale import deviation

if TYPE_CHECKING:
    from collections.abc import Sequence


class LpoSettings(AdvantageSettings):
    """Settings of LPO."""

    tau: float | Literal["std", "mean"] = Field(1.0, description="Temperature of the target, or a group statistic.")
    divergence: Literal["forward_kl", "reverse_kl"] = Field("forward_kl", description="The projection.")


class Lpo(GroupEstimator):
    """LPO's credit; see the module for the formula."""

    settings_type = LpoSettings
    settings: LpoSettings
    evidence = "text"
    least_group = 2
    centred = True

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """See the module."""
        if len(set(rewards)) == 1:
            return [0.0] * len(rewards)
        tau = self._tau(rewards)
        share = 1.0 / len(rewards)
        if self.settings.divergence == "forward_kl":
            return [weight - share for weight in softmax([reward / tau for reward in rewards])]
        mean = math.fsum(rewards) * share
        return [share * (reward - mean) / tau for reward in rewards]

    def _tau(self, rewards: Sequence[float]) -> float:
        tau = self.settings.tau
        if isinstance(tau, float):
            return tau
        found = deviation(rewards, 0) if tau == "std" else math.fsum(rewards) / len(rewards)
        return found if found > 0.0 else 1.0


class PacsSettings(AdvantageSettings):
    """Settings of PACS."""

    beta: float = Field(1.0, gt=0, description="Scale of the log-ratio.")
    threshold: float = Field(0.5, description="Least reward of a right answer.")


class Pacs(GroupEstimator):
    """PACS' credit; see the module for the formula."""

    settings_type = PacsSettings
    settings: PacsSettings
    evidence = "text and code"
    least_group = 2
    centred = True

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """See the module."""
        n = len(rewards)
        right = [reward >= self.settings.threshold for reward in rewards]
        if len(set(right)) == 1:
            return [0.0] * n
        sizes = {True: sum(right), False: n - sum(right)}
        slopes = [n / (2 * sizes[label]) * (0.5 - label) / n for label in right]
        total = math.fsum(slopes)
        return [-self.settings.beta * (slope - (total - slope) / (n - 1)) for slope in slopes]


def softmax(values: Sequence[float]) -> list[float]:
    """Probabilities that are proportional to exp(values)."""
    best = max(values)
    powers = [math.exp(value - best) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]
