"""TCOD (arXiv 2604.24005): a curriculum over the turns of an episode, so that errors of early turns do not compound.

    k(n) = min(k_0 + floor(n / eta), K),   n the step

    f2b    front to back: the student acts k turns from the start, then the episode is cut
    b2f    back to front: all but the last k actions of a known path are replayed without loss, then the student acts
    mixed  half of the prompts each way
    fixed  k = k_0 throughout: the control that the paper lacks; k_0 = 0 leaves episodes as they are and only measures

`adaptive` increases k by one once the divergence of turn k has fallen below `multiple` times that of the first turn,
both smoothed, instead of by the step. It is ours, along the lines that the authors name as future work.

The released code (kokolerk/TCOD, read) differs from the paper in what it compares: it counts the explorer's batches and
not optimizer steps, only one of its arms averages per sequence, and with equal updates f2b sees about three times as
many episodes as the plain arm. Compare arms at equal tokens and with the same aggregation. Known: the rule, eta 2 in
the text and 4 to 6 in the released settings, k_0 = 1. The episode ends at the cut, as in the paper. Evidence: text and
code read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from student.data.plan import EpisodePlan
from student.data.streams import stream
from student.methods.curricula.paths import check_paths, is_played, path_of
from student.methods.curricula.turns import DEPTH, mean_depth, note_turns, turn_divergences, turn_metrics
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.controllers import Services


_INSTEAD = "use order f2b"


class TcodSettings(ControllerSettings):
    """Settings of the curriculum."""

    order: Literal["f2b", "b2f", "mixed", "fixed"] = Field(
        "f2b",
        description="Order in which turns are learnt: f2b (front to back), b2f (back to front), mixed (half of the "
        "prompts each), or fixed (always `start` turns).",
    )
    start: int = Field(
        1, ge=0, description="k_0, the number of turns in the first step; with order fixed, 0 means all turns."
    )
    every: int = Field(2, ge=1, description="eta, the number of steps after which one more turn is added.")
    turns: int = Field(30, ge=1, description="K, the maximum number of turns.")
    adaptive: bool = Field(
        False,
        description="Add a turn once the deepest turn's divergence is low enough (see multiple), instead of every "
        "`every` steps.",
    )
    multiple: float = Field(
        2.0,
        gt=0,
        description="With adaptive: a turn is added when the deepest turn's divergence falls below this many times "
        "the first turn's.",
    )
    smoothing: float = Field(
        0.7, ge=0, lt=1, description="With adaptive: share of the smoothed divergences that each step keeps."
    )
    seed: int = Field(0, ge=0, description="Seed that decides which prompts go which way with order mixed.")

    @model_validator(mode="after")
    def _check(self) -> TcodSettings:
        if self.adaptive and self.order != "f2b":
            raise ValueError(
                "adaptive compares turns with the first one, which only order f2b always plays; use order f2b, not "
                f"{self.order}"
            )
        if self.order != "fixed" and self.start < 1:
            raise ValueError("start is 0, so the student would never act; set it to 1 or more")
        return self


class Tcod(Controller[TcodSettings]):
    """A curriculum over the turns of an episode (TCOD).

    Its state is the adaptive depth and the smoothed divergences.
    """

    @property
    def traits(self) -> Traits:
        why = f"order {self.settings.order} replays actions, for which no summaries are made; use order f2b"
        return Traits(works_ahead=True, works_with_summaries=not self._replays, why={"works_with_summaries": why})

    @property
    def _replays(self) -> bool:
        return self.settings.order in ("b2f", "mixed")

    def __init__(self, settings: TcodSettings) -> None:
        super().__init__(settings)
        self._depth = settings.start
        self._smoothed: dict[int, float] = {}

    def depth(self, step: int) -> int:
        """k, the number of turns that the student plays in a step; 0 for all."""
        s = self.settings
        if s.order == "fixed":
            return s.start
        return min(self._depth if s.adaptive else s.start + step // s.every, s.turns)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse episodes without a path, where the order replays.

        Raises:
            DataError: naming the first prompt of one.
        """
        if self._replays:
            check_paths(prompts, f"order {self.settings.order} of method tcod", _INSTEAD)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Set where each episode begins or is cut, by the depth of the step."""
        depth = self.depth(plan.step)
        if not depth:
            return plan
        return replace(plan, rows=tuple(self._episode(row, depth) for row in plan.rows))

    def _episode(self, row: PlannedRow, depth: int) -> PlannedRow:
        if not is_played(row):
            return row
        order, tags = self.settings.order, {**row.tags, DEPTH: str(depth)}
        if order == "mixed":
            way = stream(self.settings.seed, "tcod", row.key.step, row.key.uid).integers(2)
            order = "f2b" if way else "b2f"
        if order != "b2f":
            return replace(row, episode=EpisodePlan(turns=depth), tags=tags)
        path = path_of(row.prompt, f"order {self.settings.order} of method tcod", _INSTEAD)
        return replace(row, episode=EpisodePlan(replay=tuple(path[: max(0, len(path) - depth)])), tags=tags)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note the divergence of each turn."""
        for row in rows:
            note_turns(row)
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics turn_depth (k, by which the rows were planned) and those of `turn_metrics`."""
        return mean_depth(services.outcomes) | turn_metrics(services.outcomes)

    def observe(self, report: StepReport) -> None:
        """Advance the adaptive depth."""
        if not self.settings.adaptive:
            return
        past = self.settings.smoothing
        for turn, value in turn_divergences(report.outcomes).items():
            self._smoothed[turn] = past * self._smoothed[turn] + (1 - past) * value if turn in self._smoothed else value
        # Turn `depth` has index depth - 1; without a value, no episode has reached it.
        deepest, first = self._smoothed.get(self._depth - 1), self._smoothed.get(0)
        if deepest is not None and first is not None and deepest <= self.settings.multiple * first:
            self._depth = min(self._depth + 1, self.settings.turns)

    def state_dict(self) -> dict[str, Any]:
        """Depth and smoothed divergences."""
        return {"depth": self._depth, "smoothed": {str(turn): value for turn, value in self._smoothed.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._depth = int(state["depth"])
        self._smoothed = {int(turn): float(value) for turn, value in state["smoothed"].items()}
