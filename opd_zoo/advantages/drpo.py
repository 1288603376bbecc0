"""DRPO's credit: separates right from wrong answers and prefers short right ones; length never affects wrong ones.

    s_i    mean log-prob per token of response i
    maximised   sum over right i of  w_i (s_i - tau log mean over wrong j of exp(s_j / tau)),
                w = softmax over the right ones of  (1 - length / longest) / lambda
    so     A_i =  w_i / tokens_i                      for a right one
           A_j = -softmax(s / tau)_j / tokens_j       for a wrong one

The loss is -A sum_t log pi, so use ratio none and aggregation constant. Groups that are all right or all wrong get 0.
s is of the policy that sampled. The paper's penalty beta max(KL - delta, 0) KL is not offered; term reference_kl is the
plain KL. Sources: arXiv 2510.04474 and the released code, Optimization-AI/DRPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from opd_zoo.advantages.lpo import softmax
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class DrpoSettings(AdvantageSettings):
    """Settings of DRPO."""

    lam: float = Field(
        0.1, gt=0, description="lambda: the smaller, the more the credit of right answers favours short ones."
    )
    tau: float = Field(
        10.0, gt=0, description="tau: the larger, the more evenly negative credit is spread over the wrong answers."
    )
    longest: int | None = Field(
        None, ge=1, description="Length in tokens by which lengths are divided; null means rollout.max_new_tokens."
    )
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class Drpo(Advantage[DrpoSettings]):
    """Separates right from wrong answers and favours short right ones (DRPO)."""

    evidence = "text and code"
    traits = Traits(
        least_group=2,
        shift_free="group",
        scale_free="group",
        sees_threshold=True,
        reads=("behaviour",),
        of_response=True,
    )

    def __init__(self, settings: DrpoSettings) -> None:
        super().__init__(settings)
        self._longest = settings.longest or 1

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Take `longest` from the recipe if it is not set."""
        self._longest = self.settings.longest or recipe.rollout.max_new_tokens

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One credit per row (for each of its tokens), by the module's formula."""
        found: list[Credit] = [0.0] * len(outcomes)
        for places in self.groups(outcomes):
            mine = {place: outcomes[place] for place in places}
            right = [place for place, outcome in mine.items() if known(outcome) >= self.settings.threshold]
            wrong = [place for place in places if place not in right]
            # Without both sides there is nothing to compare.
            if not right or not wrong:
                continue
            # Short right answers weigh more, and so do the wrong answers that are most likely to be sampled again.
            weights = softmax([(1.0 - mine[i].length / self._longest) / self.settings.lam for i in right])
            pushes = softmax([mine[j].sums["behaviour"] / max(1, mine[j].tokens) / self.settings.tau for j in wrong])
            # The weight is of the whole response, while credit is per token.
            for place, weight in zip(right, weights, strict=True):
                found[place] = weight / max(1, mine[place].tokens)
            for place, push in zip(wrong, pushes, strict=True):
                found[place] = -push / max(1, mine[place].tokens)
        return found
