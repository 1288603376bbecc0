"""BNPO's advantage: the centred reward over a beta density fitted to the success rates of the whole batch.

    A = (r - p) min(1 / Beta(p; alpha, beta), 1e6),   p the group's mean reward, both mapped to [0, 1]
    m, v mean and variance of p over the groups;   k = m (1 - m) / v - 1
    alpha = max(1, 1 + k m / 3),   beta = max(1, 1 + k (1 - m) / 3)

With alpha = beta = 1 it is the reward minus the mean; with alpha = beta = 3/2 it is proportional to GRPO's
1 / sqrt(p (1 - p)). Rewards are mapped from [`lowest`, `highest`] to [0, 1], outside of which there is no density:
rewards that are known to leave the range are refused before the run, and others end it. Statistics are over all ranks.
Source: the released code of arXiv 2506.02864, changyi7231/BNPO.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from opd.errors import DataError
from opd_zoo.deviation import deviation
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_LARGEST = 1e6


class BnpoSettings(AdvantageSettings):
    """Settings of BNPO."""

    lowest: float = Field(0.0, description="Smallest possible reward, which is mapped to 0.")
    highest: float = Field(1.0, description="Largest possible reward, which is mapped to 1.")

    @model_validator(mode="after")
    def _rise(self) -> BnpoSettings:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}; highest must be larger")
        return self


class Bnpo(Advantage[BnpoSettings]):
    """Centred reward divided by a beta density fitted to the batch (BNPO)."""

    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(least_group=2, within=(self.settings.lowest, self.settings.highest))

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """A remark if a step has one prompt, which leaves no density to fit."""
        if recipe.rollout.prompts_per_step > 1:
            return []
        return [
            "advantage 'bnpo' equals the reward minus the group's mean when a step has one prompt; raise "
            "rollout.prompts_per_step"
        ]

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One advantage per row, by the module's formula; metrics alpha and beta.

        Raises:
            DataError: for a reward outside of the range.
        """
        found: list[Credit] = [0.0] * len(outcomes)
        groups = self.groups(outcomes)
        rewards = [self._mapped(outcome) for outcome in outcomes]
        rates = [math.fsum(rewards[place] for place in group) / len(group) for group in groups]
        alpha, beta = beta_of(rates)
        self.fired = {"alpha": (alpha, 1.0), "beta": (beta, 1.0)}
        for group, rate in zip(groups, rates, strict=True):
            weight = inverse_density(rate, alpha, beta)
            equal = len({rewards[place] for place in group}) == 1
            for place in group:
                found[place] = 0.0 if equal else (rewards[place] - rate) * weight
        return found

    def _mapped(self, outcome: Outcome) -> float:
        low, high, reward = self.settings.lowest, self.settings.highest, known(outcome)
        if not low <= reward <= high:
            raise DataError(
                f"advantage 'bnpo' fits a density to rewards from {low:g} to {high:g}, but sample {outcome.sample} of "
                f"prompt {outcome.uid} has {reward:g}; set lowest and highest to the range of the rewards."
            )
        return (reward - low) / (high - low)


def beta_of(rates: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta of the batch; one group counts as mean 0 and variance 1, as in the released code."""
    width = deviation(rates, 1)
    if width == 0.0:
        return 1.0, 1.0
    mean = math.fsum(rates) / len(rates)
    k = mean * (1.0 - mean) / width**2 - 1.0
    return max(1.0, 1.0 + k * mean / 3.0), max(1.0, 1.0 + k * (1.0 - mean) / 3.0)


def inverse_density(rate: float, alpha: float, beta: float) -> float:
    """1 / Beta(rate; alpha, beta), at most 1e6; also where the density is 0."""
    if not 0.0 < rate < 1.0:
        return _LARGEST if max(alpha, beta) > 1.0 else 1.0
    log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_density = (alpha - 1.0) * math.log(rate) + (beta - 1.0) * math.log1p(-rate) - log_norm
    # exp of more than 709 overflows a float64, and the bound is far below.
    return min(math.exp(min(-log_density, 700.0)), _LARGEST)
