"""Credit by right and wrong alone, without a baseline: PSR, NSR and W-REINFORCE.

    A_i = positive  where r_i >= threshold,   -negative  elsewhere

W-REINFORCE weighs right answers by 0.1 and wrong ones by 1 (the default). PSR is positive 1 and negative 0; NSR is
positive 0 and negative 1. Rows of weight 0 stay in the denominators. Source: the released code of arXiv 2506.01347,
TianHongZXY/RLVR-Decomposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import ConfigError
from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class SignedSettings(AdvantageSettings):
    """Settings of the two weights."""

    positive: float = Field(0.1, ge=0, description="Credit of a right answer; 0 for NSR.")
    negative: float = Field(1.0, ge=0, description="Size of the negative credit of a wrong answer; 0 for PSR.")
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class Signed(GroupEstimator[SignedSettings]):
    """Fixed credit for right and for wrong answers: PSR, NSR, W-REINFORCE."""

    evidence = "text and code"
    traits = Traits(learns_from_equal=True, shift_free="group", scale_free="group", sees_threshold=True)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse weights that are both 0.

        Raises:
            ConfigError: with the settings to raise.
        """
        if not self.settings.positive and not self.settings.negative:
            raise ConfigError("advantage 'signed' with positive 0 and negative 0 gives no credit; raise one of them.")

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        s = self.settings
        return [s.positive if reward >= s.threshold else -s.negative for reward in rewards]
