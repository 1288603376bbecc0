"""MC-GRPO's advantage: the reward minus the group's median, over the median absolute deviation.

    A_i = (r_i - median r) / (MAD + epsilon),   MAD = median |r - median r|

With `rescale`, as in the released code, the credit is multiplied by n over the number of rows with credit other than 0.
Draw an odd number of samples: the row at the median then gets 0, which has the gradient of dropping it, up to the
denominators. With binary rewards the MAD of an odd group is 0, and a minority row gets +-1 / epsilon, about 1000.
`clamp` bounds it, which is ours; without it `graded` must declare that rewards are graded. Source: arXiv 2601.22582 and
its code.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import ConfigError
from student.plugin.traits import Traits
from student.rl.advantages.base import AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class McGrpoSettings(AdvantageSettings):
    """Settings of MC-GRPO."""

    epsilon: float = Field(1e-3, gt=0, description="Constant added to the median absolute deviation.")
    rescale: bool = Field(
        True, description="Multiply the credit by the number of rows over the number with nonzero credit."
    )
    clamp: float | None = Field(
        3.0, gt=0, description="Largest absolute credit; null sets no bound, as in the released code."
    )
    graded: bool = Field(False, description="Declare that rewards take many values, so that no clamp is needed.")


class McGrpo(GroupEstimator[McGrpoSettings]):
    """Reward minus the group's median, divided by the median absolute deviation (MC-GRPO)."""

    evidence = "text and code"
    traits = Traits(least_group=2, shift_free="group", scale_free="group")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse to run without a clamp where rewards may be binary.

        Raises:
            ConfigError: with the settings to choose from.
        """
        if self.settings.clamp is None and not self.settings.graded:
            raise ConfigError(
                "advantage 'mc_grpo' without clamp gives minority answers a credit of about 1000 if rewards are "
                "binary; set clamp, or graded: true if rewards take many values."
            )

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """A remark if groups are even, which have no row at the median."""
        samples = recipe.rollout.samples_per_prompt
        if samples % 2:
            return []
        return [
            "advantage 'mc_grpo' is made for an odd number of answers, one of which is the median, but "
            f"rollout.samples_per_prompt is {samples}"
        ]

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        middle = median(rewards)
        width = median(abs(reward - middle) for reward in rewards) + self.settings.epsilon
        found = [(reward - middle) / width for reward in rewards]
        if self.settings.rescale:
            factor = len(rewards) / max(1, sum(value != 0.0 for value in found))
            found = [value * factor for value in found]
        bound = self.settings.clamp
        return found if bound is None else [max(-bound, min(bound, value)) for value in found]
