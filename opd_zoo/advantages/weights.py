"""Modifiers that weigh credit by how much there is to learn: VERIRL's balance, PuzzleCraft, GRPO-S of DR-IRL.

    sample_balance   A |R - p|,   p = exp(mean log pi(y_t)) of the response, R cut to [0, 1]
    puzzlecraft      A (floor + (1 - floor) 4 m (1 - m) d),   m the group's mean reward, cut to [0, 1]
                     d = H(answers) / log n, the entropy of the distinct final answers among the n of the group
    grpo_s           A h (g / mean g),   g = max R - mean R of the group, mean over the groups of the step

sample_balance: what is right and already likely, or wrong and already unlikely, counts for little; p is of the policy
that sampled. puzzlecraft: groups of medium difficulty whose answers differ count most; needs reward `answer_classes`.
grpo_s: prompts on which the best answer is far above the others count more (the policy still responds to them); h is a
number of the prompt's kept column `hardness`, if `column` names one. Sources: VERIRL, arXiv 2508.18462, PuzzleCraft,
2512.14944, and DR-IRL, 2503.18991 (all three inferred from their abstracts: what enters is theirs, the forms are ours;
DR-IRL's reward models by category are not here: reward judge or http_judge asks one).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.errors import ConfigError, DataError, short
from opd_zoo.rewards.answer_classes import CLASS
from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, Credit, Modifier, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class SampleBalance(Modifier):
    """Modifier: less weight for answers that are already as likely as they are right (VERIRL)."""

    evidence = "inferred"
    traits = Traits(reads=("behaviour",))

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; metric weight, its mean over the rows."""
        likely = [math.exp(outcome.sums["behaviour"] / max(1, outcome.tokens)) for outcome in outcomes]
        weights = [abs(_cut(known(outcome)) - p) for outcome, p in zip(outcomes, likely, strict=True)]
        self.fired = {"weight": (math.fsum(weights), float(len(weights)))}
        return [value * weight for value, weight in zip(credit, weights, strict=True)]


class PuzzleCraftSettings(AdvantageSettings):
    """Settings of PuzzleCraft's weight."""

    floor: float = Field(0.1, ge=0, lt=1, description="Weight of a group whose answers are all alike.")


class PuzzleCraft(Modifier[PuzzleCraftSettings]):
    """Modifier: more weight for groups of medium difficulty whose answers differ (PuzzleCraft)."""

    evidence = "inferred"
    traits = Traits(reads=("answer_classes",), least_group=2, why={"reads": "add reward answer_classes"})

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; metrics weight and dispersion, means over the groups."""
        found, floor = list(credit), self.settings.floor
        weights, spreads = [], []
        for group in self.groups(outcomes):
            mean = math.fsum(_cut(known(outcomes[place])) for place in group) / len(group)
            spreads.append(_dispersion([outcomes[place].notes.get(CLASS) for place in group]))
            weights.append(floor + (1.0 - floor) * 4.0 * mean * (1.0 - mean) * spreads[-1])
            for place in group:
                found[place] = found[place] * weights[-1]
        count = float(len(weights))
        self.fired = {"weight": (math.fsum(weights), count), "dispersion": (math.fsum(spreads), count)}
        return found


class GrpoSSettings(AdvantageSettings):
    """Settings of GRPO-S."""

    column: str = Field(
        "", description="Kept column with a prompt's hardness, a number that multiplies its credit; empty for none."
    )


class GrpoS(Modifier[GrpoSSettings]):
    """Modifier: more weight for hard prompts and for those with a large gap in reward (GRPO-S of DR-IRL)."""

    evidence = "inferred"

    @property
    def traits(self) -> Traits:
        return Traits(columns=(self.settings.column,) if self.settings.column else ())

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse steps of one prompt, whose gap would be compared with itself.

        Raises:
            ConfigError: with the setting to raise.
        """
        if recipe.rollout.prompts_per_step < 2 and not self.settings.column:
            raise ConfigError(
                "advantage 'grpo_s' weighs the prompts of a step against each other, but there is only one; raise "
                "rollout.prompts_per_step."
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a hardness that is not a number.

        Raises:
            DataError: naming the first prompt of one.
        """
        for prompt in prompts if self.settings.column else ():
            self._hardness(prompt)

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row, without the hardness; metric gap, its mean over the groups."""
        found, groups = list(credit), self.groups(outcomes)
        rewards = [[known(outcomes[place]) for place in group] for group in groups]
        gaps = [max(group) - math.fsum(group) / len(group) for group in rewards]
        total = math.fsum(gaps)
        for group, gap in zip(groups, gaps, strict=True):
            for place in group:
                found[place] = found[place] * (gap * len(gaps) / total if total else 1.0)
        self.fired = {"gap": (total, float(len(gaps)))}
        return found

    def refine(self, row: Row, credit: Credit) -> Credit:
        """The credit times the prompt's hardness."""
        return credit * self._hardness(row.prompt) if self.settings.column else credit

    def _hardness(self, prompt: Prompt) -> float:
        value = prompt.extra.get(self.settings.column)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise DataError(
                f"column {self.settings.column!r} of {prompt.name} is {short(value)}; advantage grpo_s needs a number "
                "of at least 0 there."
            )
        return float(value)


def _cut(reward: float) -> float:
    return min(max(reward, 0.0), 1.0)


def _dispersion(classes: Sequence[float | None]) -> float:
    """The entropy of the classes over that of n different ones; an answer without a class counts as one of its own."""
    counts = list(Counter(x for x in classes if x is not None).values()) + [1] * list(classes).count(None)
    shares = np.sort(np.array(counts, np.float64)) / len(classes)
    return float(-(shares * np.log(shares)).sum() / math.log(len(classes))) if len(classes) > 1 else 0.0
