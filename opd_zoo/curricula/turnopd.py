"""TurnOPD (arXiv 2607.05804): a cap on the turns of episodes, set from statistics of occasional full episodes.

    H_cov   the 80 % quantile of the number of turns of successful episodes; of all episodes if none succeeds
    H_eff   sum_k n_k k KL_k / sum_k n_k KL_k,   k from 1, n_k episodes reached turn k: the centroid of the KL
    H       max(H_eff, H_cov), smoothed; other steps play ceil(H) turns

Statistics come only from full steps, every `probe_every` steps, because statistics of capped steps could only lower the
cap. The other half of the method is the loss (1 - a) L_token + a L_turn with a from 0 to 1 over the run, which is two
terms with weight schedules: aggregation token_mean from 1 to 0, and turn_mean from 0 to 1. Known from two notes on the
paper that agree (no code was published): rule and quantile. Smoothing, probe interval and minimum number of probes are
those of a re-implementation. Evidence: secondary sources only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from student.data.plan import EpisodePlan
from student.methods.curricula.paths import is_played
from student.methods.curricula.turns import (
    DEPTH,
    mean_depth,
    note_turns,
    sampled_episodes,
    turn_metrics,
    turn_notes,
)
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.controllers import Services


class TurnOpdSettings(ControllerSettings):
    """Settings of the depth."""

    quantile: float = Field(
        0.8, gt=0, le=1, description="Quantile, over successful episodes, of the number of turns; H is at least that."
    )
    smoothing: float = Field(0.7, ge=0, lt=1, description="Share of the smoothed cap H that each full step keeps.")
    probe_every: int = Field(
        8, ge=2, description="Number of steps from one full step, whose episodes are not capped, to the next."
    )
    probes: int = Field(8, ge=1, description="Minimum number of episodes that a full step needs to change H.")
    shortest: int = Field(2, ge=1, description="Lower bound on the cap, in turns.")
    longest: int = Field(30, ge=1, description="Upper bound on the cap, in turns.")

    @model_validator(mode="after")
    def _check(self) -> TurnOpdSettings:
        if self.shortest > self.longest:
            raise ValueError(f"shortest is {self.shortest}, more than longest, which is {self.longest}; lower it")
        return self


class TurnOpd(Controller[TurnOpdSettings]):
    """Caps the turns of episodes by statistics of full episodes (TurnOPD).

    Its state is the smoothed depth.
    """

    traits = Traits(works_ahead=True)

    def __init__(self, settings: TurnOpdSettings) -> None:
        super().__init__(settings)
        self._horizon: float | None = None

    def full(self, step: int) -> bool:
        """Whether a step plays whole episodes."""
        return self._horizon is None or step % self.settings.probe_every == 0

    def depth(self, step: int) -> int:
        """The number of turns that the student plays in a step; 0 for all."""
        if self.full(step) or self._horizon is None:
            return 0
        return min(max(math.ceil(self._horizon), self.settings.shortest), self.settings.longest)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Cut each episode at the depth of the step."""
        depth = self.depth(plan.step)
        if not depth:
            return plan
        rows = [
            replace(
                row,
                episode=replace(row.episode or EpisodePlan(), turns=depth),
                tags={**row.tags, DEPTH: str(depth)},
            )
            if is_played(row)
            else row
            for row in plan.rows
        ]
        return replace(plan, rows=tuple(rows))

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note the divergence of each turn."""
        for row in rows:
            note_turns(row)
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics turn_depth (0 for a full step), turn_horizon (H before this step) and those of `turn_metrics`."""
        found = mean_depth(services.outcomes) | turn_metrics(services.outcomes)
        return found if self._horizon is None else {**found, "turn_horizon": self._horizon}

    def observe(self, report: StepReport) -> None:
        """Update H after a full step."""
        if not self.full(report.step):
            return
        played = [o for o in sampled_episodes(report.outcomes) if not o.tags["ended"].startswith("broken")]
        value = horizon(played, self.settings.quantile) if len(played) >= self.settings.probes else None
        if value is not None:
            past = self.settings.smoothing if self._horizon is not None else 0.0
            self._horizon = past * (self._horizon or 0.0) + (1 - past) * value

    def state_dict(self) -> dict[str, Any]:
        """The smoothed depth."""
        return {"horizon": self._horizon}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._horizon = None if state["horizon"] is None else float(state["horizon"])


def horizon(outcomes: Sequence[Outcome], quantile: float) -> float | None:
    """max(H_eff, H_cov) of full episodes, turns; None if no turn has a divergence."""
    ended = [outcome.notes["turns"] for outcome in outcomes if outcome.tags["ended"] == "success"]
    depths = ended or [outcome.notes["turns"] for outcome in outcomes]
    sums: dict[int, float] = {}
    for outcome in outcomes:
        for turn, value in turn_notes(outcome.notes).items():
            sums[turn] = sums.get(turn, 0.0) + value
    # Sampled divergences may be negative by noise; a negative weight would move the centroid outside the turns.
    weights = {turn + 1: max(0.0, value) for turn, value in sums.items()}
    total = math.fsum(weights.values())
    if not depths or not total:
        return None
    effective = math.fsum(turn * weight for turn, weight in weights.items()) / total
    return max(effective, float(np.quantile(depths, quantile)))
