"""A reward that moves with the length of the answer along half a cosine, separately for right and wrong answers.

    r = end + (start - end) (1 + cos(pi L / longest)) / 2,   L tokens that the student wrote
    right   start 1.1, end 0.7      wrong   start 0, end -0.3      longer, or cut by the limit   -0.5

Short right answers earn most, and wrong ones cost more the longer they are (with start below end it is the reverse, as
in arXiv 2502.03373, where the form is from). The numbers are those of TT-OPD's runs (arXiv 2605.02943, longest 12288),
where an episode counts as a whole. Evidence: text and code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, is_correct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class CosineLengthSettings(RewardSettings):
    """Settings of the reward."""

    longest: int = Field(
        12288, ge=1, description="Length in tokens at which the cosine ends; longer answers get `over`."
    )
    right: tuple[float, float] = Field(
        (1.1, 0.7), description="Reward of a right answer at length 0, and at `longest`."
    )
    wrong: tuple[float, float] = Field(
        (0.0, -0.3), description="Reward of a wrong answer at length 0, and at `longest`."
    )
    over: float = Field(-0.5, description="Reward of an answer longer than `longest`, or cut by the length limit.")


class CosineLength(Reward[CosineLengthSettings]):
    """A reward that depends on the answer's length along a cosine."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    by_group = False
    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(rewards_cut=f"rewards cut answers with {self.settings.over:g} (over)")

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest of the cosines' ends and `over`."""
        ends = (*self.settings.right, *self.settings.wrong, self.settings.over)
        return min(ends), max(ends)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metrics length (as a share of `longest`) and over (share of rows)."""
        for row in rows:
            length, right = int(row.written.sum()), is_correct(row)
            over = row.truncated or length > self.settings.longest
            known = None if right is None else self.value(right, length)
            row.reward = self.settings.over if over else known
            self.fire("length", min(1.0, length / self.settings.longest))
            self.fire("over", float(over))

    def value(self, right: bool, length: int) -> float:
        """The reward r of a judged answer of at most `longest` tokens."""
        start, end = self.settings.right if right else self.settings.wrong
        return end + (start - end) * (1 + math.cos(math.pi * length / self.settings.longest)) / 2
