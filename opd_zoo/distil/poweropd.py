"""PowerOPD: the Box-Cox transform of both probabilities instead of their logarithms.

    A = (T(y)^alpha - S(y)^alpha) / alpha,      |A| <= 1 / alpha

The reward is bounded, has the sign of the log-ratio and tends to it as alpha goes to 0; with a larger alpha, only
likely tokens matter. Source: arXiv 2606.17199.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class PowerOpdSettings(TokenRewardSettings):
    """Settings of PowerOPD."""

    alpha: float = Field(
        1.0,
        gt=0,
        le=20,
        description="Power alpha of the probabilities in the Box-Cox transform; small values approach the log-ratio.",
    )


class PowerOpd(TokenReward[PowerOpdSettings]):
    """Sampled distillation with a Box-Cox reward."""

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        alpha = self.settings.alpha
        # expm1 keeps the difference exact where alpha is small.
        return ((alpha * teacher).expm1() - (alpha * student).expm1()) / alpha, {}
