"""RoRecomp: short right and long wrong answers are learnt from at once, the others later, against long answers.

    of each group   the `alpha` of its right answers that are shortest, the `alpha` of its wrong ones that are longest
    the rest waits; with probability `compensate`, once `wait` groups wait, the oldest join a step

Credit is that of the whole group both times: rows that are not their turn count in the statistics and are not learnt
from. The authors make an extra update of what waited; here it joins the batch of the step. alpha and the probability
are not stated in the text that was read: those here are ours. Source: arXiv 2509.25958 (text).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from student.data.outcome import reward_of
from student.data.streams import stream
from student.rollout.strategies.replay import Replaying, ReplaySettings, as_replayed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.controllers import StepReport
    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.learning.terms import Term
    from student.recipe import Recipe
    from student.rollout.rounds import Rollouts


class RoRecompSettings(ReplaySettings):
    """Settings of RoRecomp."""

    alpha: float = Field(0.5, gt=0, le=1, description="Share of right, and of wrong, answers that go first.")
    wait: int = Field(16, ge=1, description="Groups that must wait before the oldest so many can join a step.")
    compensate: float = Field(0.5, ge=0, le=1, description="Chance that they do.")
    threshold: float = Field(0.5, description="Least reward of a right answer.")


class RoRecomp(Replaying):
    """The strategy; its state is the groups that wait."""

    settings_type = RoRecompSettings
    settings: RoRecompSettings
    evidence: ClassVar[str] = "text"

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse settings with which nothing waits, or what waits is never learnt from.

        Raises:
            ConfigError: with the setting to change.
        """
        super().check(recipe, terms)
        s = self.settings
        if s.alpha == 1.0:
            raise ConfigError("rollout.strategy rorecomp with alpha 1 learns from all answers at once; lower alpha.")
        if s.wait > s.capacity:
            raise ConfigError(
                f"rollout.strategy rorecomp waits for {s.wait} groups and keeps {s.capacity}, so that none is ever "
                "learnt from later; lower wait or raise capacity."
            )

    def remarks(self, recipe: Recipe) -> list[str]:
        """That what waits is never learnt from."""
        said = "rollout.strategy rorecomp with compensate 0 never learns from the answers that wait"
        return [] if self.settings.compensate else [said]

    def run(self, plan: StepPlan, rollouts: Rollouts) -> list[Row]:
        """See `Strategy.run`."""
        rows = super().run(plan, rollouts)
        fresh = [row for row in rows if row.origin != "replay"]
        rollouts.measure("rorecomp/first_share", sum(row.trained for row in fresh), len(fresh))
        return rows

    def kept_of(self, group: Sequence[Row]) -> list[Row]:
        """Mark the answers of the group that go first; the same group with the others marked is kept."""
        rewards = {id(row): reward for row in group if (reward := reward_of(row)) is not None}
        known = [row for row in group if id(row) in rewards]
        # What a reward takes out of the loss is learnt from neither now nor later.
        able = {id(row) for row in known if row.trained}
        right = [row for row in known if id(row) in able and rewards[id(row)] >= self.settings.threshold]
        wrong = [row for row in known if id(row) in able and rewards[id(row)] < self.settings.threshold]
        right.sort(key=lambda row: (row.length, row.key.sample))
        wrong.sort(key=lambda row: (-row.length, row.key.sample))
        first = {id(row) for kind in (right, wrong) for row in kind[: math.ceil(self.settings.alpha * len(kind))]}
        for row in group:
            row.trained = id(row) in first
        if able == first:
            return []
        return [as_replayed(row, trained=id(row) in able - first) for row in known]

    def drawn(self, step: int, groups: int) -> list[int]:
        """The oldest, by chance."""
        wait = self.settings.wait
        lucky = stream(self.settings.seed, "rorecomp", step).random() < self.settings.compensate
        return list(range(wait)) if len(self.groups) >= wait and lucky else []

    def observe(self, report: StepReport) -> None:
        """What joined the step waits no longer; what it left does."""
        # By the outcomes and not by what was drawn, which a run that is resumed after the update does not know.
        joined = {f"{o.step}/{o.uid}" for o in report.outcomes if o.origin == "replay"}
        self.groups = [group for group in self.groups if f"{group[0].key.step}/{group[0].key.uid}" not in joined]
        super().observe(report)
