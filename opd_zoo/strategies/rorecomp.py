"""RoRecomp: short right and long wrong answers are learnt from at once, the others later, to discourage long answers.

    of each group   the share `alpha` of right answers that are shortest, and of wrong answers that are longest
    the rest waits; with probability `compensate`, once `wait` groups wait, the oldest join a step

Credit is that of the whole group both times: rows whose turn it is not count in the statistics but are not learnt from.
The authors make an extra update from the waiting rows; here they join the batch of the step. The text that was read
states neither alpha nor the probability; the values here are ours. Source: arXiv 2509.25958 (text).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.strategies.replay import Replaying, ReplaySettings, as_replayed
from student.data.outcome import reward_of
from student.data.streams import stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe


class RoRecompSettings(ReplaySettings):
    """Settings of RoRecomp."""

    alpha: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a group's right answers, the shortest, and of its wrong ones, the longest, that are "
        "learnt from at once.",
    )
    wait: int = Field(
        16, ge=1, description="Number of groups that join a step together, the oldest of those that wait."
    )
    compensate: float = Field(
        0.5, ge=0, le=1, description="Probability that they join a step, once enough of them wait."
    )
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class RoRecomp(Replaying[RoRecompSettings]):
    """Learns short right and long wrong answers first, the others later (RoRecomp).

    Its state is the waiting groups.
    """

    evidence: ClassVar[str] = "text"

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse settings with which no rows wait, or waiting rows are never learnt from.

        Raises:
            ConfigError: naming the setting to change.
        """
        super().check(recipe, terms)
        s = self.settings
        if s.alpha == 1.0:
            raise ConfigError("rollout.strategy rorecomp with alpha 1 learns from all answers at once; lower alpha.")
        if s.wait > s.capacity:
            raise ConfigError(
                f"rollout.strategy rorecomp waits for {s.wait} groups (wait) but keeps only {s.capacity} (capacity), "
                "so the waiting answers would never be learnt from; lower wait or raise capacity."
            )

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Warn if waiting rows are never learnt from."""
        said = "rollout.strategy rorecomp with compensate 0 never learns from the answers that wait"
        return [] if self.settings.compensate else [said]

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        rows = super().run(plan, sampling)
        fresh = [row for row in rows if row.origin != "replay"]
        sampling.measure("rorecomp/first_share", sum(row.trained for row in fresh), len(fresh))
        return rows

    def kept_of(self, group: Sequence[Row]) -> list[Row]:
        """Mark the answers to learn from now; keep a copy of the group with the other answers marked."""
        rewards = {id(row): reward for row in group if (reward := reward_of(row)) is not None}
        known = [row for row in group if id(row) in rewards]
        # Rows that a reward took out of the loss are learnt from neither now nor later.
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
        """The oldest waiting groups, with probability `compensate`."""
        wait = self.settings.wait
        lucky = stream(self.settings.seed, "rorecomp", step).random() < self.settings.compensate
        return list(range(wait)) if len(self.groups) >= wait and lucky else []

    def observe(self, report: StepReport) -> None:
        """Remove the groups that joined the step, and add the new ones that wait."""
        # Read from the outcomes, because a run resumed after the update does not know what was drawn.
        joined = {f"{o.step}/{o.uid}" for o in report.outcomes if o.origin == "replay"}
        self.groups = [group for group in self.groups if f"{group[0].key.step}/{group[0].key.uid}" not in joined]
        super().observe(report)
