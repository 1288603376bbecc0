"""DAPO's soft overlong punishment: a penalty that grows over the last tokens before the length limit.

    part = 0                               |y| <= L - B
           -(|y| - (L - B)) / B * penalty  L - B < |y| <= L
           -penalty                        |y| > L

L is the length limit and B the buffer, both in tokens. Source: arXiv 2503.14476, its section on overlong rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import ConfigError
from student.data.needs import Needs
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class OverlongSettings(RewardSettings):
    """Settings of the overlong penalty."""

    buffer: int = Field(ge=1, description="Number of tokens before the limit over which the penalty grows.")
    limit: int | None = Field(None, ge=1, description="Length limit in tokens; null means rollout.max_new_tokens.")
    penalty: float = Field(1.0, gt=0, description="Penalty at the limit.")


class Overlong(Reward[OverlongSettings]):
    """A penalty that grows over the last tokens before the length limit (DAPO)."""

    evidence = "text"
    by_group = False

    @property
    def traits(self) -> Traits:
        return Traits(rewards_cut="penalises cut answers most" if self.limit >= self._longest else "")

    def __init__(self, settings: OverlongSettings) -> None:
        super().__init__(settings)
        self.limit = settings.limit or 0
        self._longest = 0

    def needs(self) -> Needs:
        """Nothing: it reads only lengths."""
        return Needs()

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Take the limit from the recipe if it is not set.

        Raises:
            ConfigError: if no response can be long enough, or the buffer is longer than the limit.
        """
        longest = self._longest = recipe.rollout.max_new_tokens
        self.limit = self.settings.limit or longest
        if self.settings.buffer > self.limit:
            raise ConfigError(
                f"reward overlong has a buffer of {self.settings.buffer} tokens, more than the limit of {self.limit}; "
                "lower it."
            )
        if self.limit - self.settings.buffer >= longest:
            raise ConfigError(
                f"reward overlong begins after {self.limit - self.settings.buffer} tokens, but responses have at most "
                f"{longest}; lower its limit, or remove it."
            )

    def bounds(self) -> tuple[float, float]:
        """The full penalty, and 0."""
        return -self.settings.penalty, 0.0

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Add the penalty as a part; metric bites, the share of rows with a penalty."""
        buffer = self.settings.buffer
        for row in rows:
            # By length alone, as in the source: an answer that ends by itself within the buffer is penalised too.
            over = min(max(row.length - (self.limit - buffer), 0), buffer)
            row.reward_parts[self.label] = -self.settings.penalty * over / buffer
            self.fire("bites", float(over > 0))
