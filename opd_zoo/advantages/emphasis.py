"""Modifiers that give some credit more weight: rare outcomes, or tokens at which the student is uncertain.

    weighted_grpo     p the group's success rate;   p <= 1/2: right answers times 1 / p,   else wrong ones times
                      1 / (1 - p);   then the group's mean |A| is restored
    entropy_shaping   A_t -> A_t + min(alpha H_t, |A_t| / kappa),   H_t the entropy at the token, without gradient

For kappa > 1 entropy_shaping never changes a sign; it adds to good and bad answers alike. With `until` it acts only
before the first occurrence of that text in a response, as FunRL does on the reasoning. H_t is of the present student.
GRPO's deviation already scales a rare outcome by about 1 / sqrt(p (1 - p)). Sources: weighted GRPO, arXiv 2602.03452,
and FunRL, 2508.05118 (both inferred from abstracts); MSSR, 2512.18215 (notes), whose usual values are the defaults.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from student.data.needs import SCORES, Needs
from student.data.token_batch import have
from student.rl.advantages.base import AdvantageSettings, Credit, Modifier, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.data.token_batch import TokenBatch


class WeightedGrpoSettings(AdvantageSettings):
    """Settings of weighted GRPO."""

    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")
    most: float = Field(10.0, gt=1, description="Maximum weight of a rare outcome.")


class WeightedGrpo(Modifier[WeightedGrpoSettings]):
    """Modifier: more weight for rare outcomes of a prompt (weighted GRPO)."""

    evidence = "inferred"

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; metric weight, its mean over groups with right and wrong answers."""
        found, weights = list(credit), []
        for group in self.groups(outcomes):
            right = {place for place in group if known(outcomes[place]) >= self.settings.threshold}
            if not 0 < len(right) < len(group):
                continue
            rare = right if 2 * len(right) <= len(group) else set(group) - right
            weight = min(len(group) / len(rare), self.settings.most)
            before = math.fsum(float(np.mean(np.abs(found[place]))) for place in group)
            for place in rare:
                found[place] = found[place] * weight
            # Restore the group's mean |A|, or the weight would also act as a larger learning rate.
            after = math.fsum(float(np.mean(np.abs(found[place]))) for place in group)
            for place in group:
                found[place] = found[place] * (before / after if after else 1.0)
            weights.append(weight)
        self.fired = {"weight": (math.fsum(weights), float(len(weights)))}
        return found


class EntropyShapingSettings(AdvantageSettings):
    """Settings of entropy shaping."""

    alpha: float = Field(0.4, gt=0, description="Weight of the entropy that is added to the credit.")
    kappa: float = Field(2.0, gt=1, description="Limits what is added to |A| / kappa.")
    until: str = Field(
        "",
        description="Text in the response at which the shaping ends, for example </think>; empty means that it never "
        "ends.",
    )


class EntropyShaping(Modifier[EntropyShapingSettings]):
    """Modifier: more credit for tokens at which the student is uncertain (MSSR, FunRL)."""

    evidence = "inferred"

    def __init__(self, settings: EntropyShapingSettings) -> None:
        super().__init__(settings)
        self._mark: NDArray[np.uint32] = np.zeros(0, np.uint32)

    def needs(self) -> Needs:
        """The student's entropy at each token."""
        return Needs(student=frozenset({SCORES}))

    def bind(self, tokenizer: Any) -> None:
        """Encode the text that ends the shaping."""
        if self.settings.until:
            self._mark = np.array(tokenizer(self.settings.until, add_special_tokens=False)["input_ids"], np.uint32)

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """The credit unchanged: shaping is per token, in `shape`."""
        return list(credit)

    def shape(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] shaped credit; metric shaping, the mean addition over tokens with credit."""
        import torch

        entropy = have(batch.student.scores, "scores").entropy.detach().to(advantage.dtype)
        bound = advantage.abs() / self.settings.kappa
        added = torch.minimum(self.settings.alpha * entropy, bound)
        # The bound is a share of |A|, so tokens without credit get nothing; they would only dilute the metric.
        counted = batch.mask & (advantage != 0)
        if len(self._mark):
            counted = counted & (batch.position < batch.of_rows([self._end(row) for row in batch.rows]))
        added = torch.where(counted, added, torch.zeros_like(added))
        self.fired = {"shaping": (added.sum(), counted.sum())}
        return advantage + added

    def _end(self, row: Row) -> int:
        """Position at which the text begins in a response; the response's length if it does not occur."""
        size = len(self._mark)
        for start in range(row.length - size + 1):
            if np.array_equal(row.response_ids[start : start + size], self._mark):
                return start
        return row.length
