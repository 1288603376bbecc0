"""REOPOLD: a floor under the token reward, and two phases of token selection.

    A = max(log T(y) - log S(y), log(lambda) / (1 - lambda))

The floor is the least reward that the mixture lambda S + (1 - lambda) T could give, divided by its share of T. In the
exploration phase (the first `exploration_steps`), tokens below the floor are left out; in the refinement phase (after),
only the share `retention` of each response with the highest student entropy counts. Tokens that are left out stay in
the denominator here, so that the phases differ in which tokens teach but not in the effective learning rate.

Source: arXiv 2603.11137, its formulas as two independent reimplementations give them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.distil.selection import top_share
from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings
from student.data.token_batch import have

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class ReopoldSettings(TokenRewardSettings):
    """Settings of REOPOLD."""

    mixture: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="lambda, which sets the floor of the token reward, log(lambda) / (1 - lambda); 0.2 puts it at "
        "-2.01 nats.",
    )
    exploration_steps: int = Field(
        0, ge=0, description="Number of steps of the exploration phase; 0 begins with refinement."
    )
    retention: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Share of each response's tokens, those of highest entropy, that the refinement phase learns from.",
    )


class Reopold(TokenReward[ReopoldSettings]):
    """Sampled distillation with a floor under the reward, in two phases."""

    traits = replace(TokenReward.traits, ranks_tokens=True)

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """See the module; metrics floored_share and selected_share."""
        import torch

        floor = math.log(self.settings.mixture) / (1.0 - self.settings.mixture)
        ratio = teacher - student
        low = batch.mask & (ratio < floor)
        refined, _ = top_share(
            have(batch.student.scores, "scores").entropy, batch.row, batch.mask, self.settings.retention
        )
        exploring = batch.of_rows([row.key.step < self.settings.exploration_steps for row in batch.rows])
        kept = torch.where(exploring, batch.mask & ~low, refined)
        count = batch.mask.sum()
        metrics = {"floored_share": (low.sum(), count), "selected_share": (kept.sum(), count)}
        return torch.where(kept, ratio.clamp(min=floor), torch.zeros_like(ratio)), metrics
