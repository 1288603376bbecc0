"""ReOPD's prefix replay (arXiv 2607.04763): one turn of the student, at a random point of a recorded path.

    point t of a path of M actions is drawn with probability proportional to kappa^t,   t = 0 ... M - 1

The first t actions are replayed without loss and the student only writes turn t, so a row costs one turn. The authors
draw t when they prepare the data and take observations from the recording; here the path is played again in the
environment, which shows whether it is still valid. Paths are in the prompt's column `path` (the tasks of environments
provide a path that solves each problem). Known: kappa 0.6. Evidence: text and code; the authors' pool script is not
public.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from student.data.plan import EpisodePlan
from student.data.streams import stream
from student.methods.curricula.paths import check_paths, is_played, path_of
from student.methods.curricula.turns import note_turns, turn_metrics
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.plugin.controllers import Services


_READER = "method prefix_replay"


class PrefixReplaySettings(ControllerSettings):
    """Settings of the draw."""

    decay: float = Field(
        0.6,
        gt=0,
        le=1,
        description="kappa: point t of a path is drawn with probability proportional to kappa^t; 1 draws all points "
        "alike.",
    )
    turns: int = Field(1, ge=1, description="Number of turns that the student plays after the replayed part.")
    seed: int = Field(0, ge=0, description="Seed of the draw.")


class PrefixReplay(Controller[PrefixReplaySettings]):
    """Samples one turn at a random point of a recorded path (ReOPD)."""

    traits = Traits(
        works_ahead=True,
        works_with_summaries=False,
        why={"works_with_summaries": "it replays actions, for which no summaries are made"},
    )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse episodes without a path.

        Raises:
            DataError: naming the first prompt of one.
        """
        check_paths(prompts, _READER)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Make each episode begin at a point of its path."""
        return replace(plan, rows=tuple(self._episode(row) for row in plan.rows))

    def _episode(self, row: PlannedRow) -> PlannedRow:
        if not is_played(row):
            return row
        path = path_of(row.prompt, _READER)
        place = self.place(row, len(path))
        return replace(row, episode=EpisodePlan(turns=self.settings.turns, replay=tuple(path[:place])))

    def place(self, row: PlannedRow, length: int) -> int:
        """The point t, drawn from the row's own random stream."""
        key = row.key
        weights = self.settings.decay ** np.arange(length, dtype=np.float64)
        drawn = stream(self.settings.seed, "prefix_replay", key.step, key.uid, key.sample).random()
        return min(int(np.searchsorted(np.cumsum(weights / weights.sum()), drawn, side="right")), length - 1)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note the divergence of each turn."""
        for row in rows:
            note_turns(row)
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics of `turn_metrics`, and replayed: mean turns replayed."""
        played = [outcome.notes["replayed"] for outcome in services.outcomes if "replayed" in outcome.notes]
        found = turn_metrics(services.outcomes)
        return {**found, "replayed": float(np.mean(played))} if played else found
