"""DLER: the verdict, and 0 for an answer that the length limit cut, however right it reads.

    whole = 0                 for a response over the limit
            verdict           else

With `easy_limit` the limit of a group depends on its success (DA-DLER): `easy_limit` if at least `easy_share` of its
answers are right, else `limit`. An answer over a limit shorter than the rollout's counts as cut. The rest of DLER are
settings elsewhere: a group's mean over the deviation of the batch, clip_low 0.2, clip_high 0.28, and drawing again
groups that are all right or all wrong. Sources: arXiv 2510.15110 and the authors' code (github NVlabs/DLER).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from opd.errors import ConfigError
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, in_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class DlerSettings(RewardSettings):
    """Settings of DLER."""

    limit: int | None = Field(
        None, ge=1, description="Length limit in tokens; null means rollout.max_new_tokens alone."
    )
    easy_limit: int | None = Field(None, ge=1, description="Length limit of easy groups in tokens; null means limit.")
    easy_share: float = Field(0.5, gt=0, le=1, description="Share of right answers at which a group counts as easy.")

    @model_validator(mode="after")
    def _check(self) -> DlerSettings:
        if self.easy_limit is not None and (self.limit is None or self.easy_limit >= self.limit):
            raise ValueError(f"easy_limit is {self.easy_limit}, but it must be below limit, which is {self.limit}")
        return self


class Dler(Reward[DlerSettings]):
    """The verdict, and 0 for an answer that the length limit cut (DLER)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(rewards_cut="rewards cut answers with 0" if self.settings.limit is None else "")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a limit that no answer can exceed.

        Raises:
            ConfigError: with the setting to lower.
        """
        longest = recipe.rollout.max_new_tokens
        least = self.settings.easy_limit or self.settings.limit
        if least is not None and least >= longest:
            raise ConfigError(
                f"reward dler has a limit of {least} tokens, but answers have at most {longest} "
                "(rollout.max_new_tokens), so it never acts; lower it, or remove the reward."
            )

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metric cut_share, the share of rows over the limit."""
        for group in in_groups(rows):
            limit = self._limit(group)
            for row in group:
                cut = row.truncated or (limit is not None and row.length > limit)
                row.reward = 0.0 if cut else row.verdict_value
                self.fire("cut_share", float(cut))

    def _limit(self, group: Sequence[Row]) -> int | None:
        values = [value for row in group if (value := row.verdict_value) is not None]
        # Answers that could not be judged do not count in how easy the prompt is.
        easy = bool(values) and sum(value >= 1.0 for value in values) / len(values) >= self.settings.easy_share
        return self.settings.easy_limit if easy and self.settings.easy_limit is not None else self.settings.limit
