"""The reward of Tulu 3's RLVR: ten for what the verifier accepts, and a penalty for an answer that does not end.

    whole = scale * [verdict is correct],   - penalty for an answer that the length limit cut, right or wrong

The scores of a reward model do not count. The recipe, in examples/recipes, uses PPO (objective ppo, method critic),
reward kl_penalty with beta 0.05 (0.07 at 70B), learning rate 3e-7, temperature 1 and answers of up to 2048 tokens. The
authors initialise the critic from their reward model; here it is heads on the student's features. Sources: arXiv
2411.15124; scale and penalty from the documentation of allenai/open-instruct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, check_scale, is_correct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class Tulu3Settings(RewardSettings):
    """Settings of the reward."""

    scale: float = Field(10.0, gt=0, description="Reward of a right answer.")
    penalty: float = Field(10.0, ge=0, description="Penalty of an answer that the length limit cut.")


class Tulu3(Reward[Tulu3Settings]):
    """10 for a right answer, minus 10 for an unfinished one (Tulu 3 RLVR)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    by_group = False
    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(rewards_cut="penalises cut answers" if self.settings.penalty else "")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a scale that every advantage would cancel.

        Raises:
            ConfigError: if every advantage divides by the deviation of the rewards, and there is no other reward.
        """
        if not self.settings.penalty and self.settings.scale != 1.0 and len(recipe.rewards) == 1:
            check_scale(f"scale {self.settings.scale:g} of reward 'tulu3' with penalty 0", terms)

    def bounds(self) -> tuple[float, float]:
        """Minus the penalty, and the scale."""
        return -self.settings.penalty, self.settings.scale

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metric cut_share."""
        for row in rows:
            right = is_correct(row)
            # A cut answer gets the penalty, whether or not the verifier could judge it.
            known = None if right is None else self.settings.scale * right
            row.reward = -self.settings.penalty if row.truncated else known
            self.fire("cut_share", float(row.truncated))
