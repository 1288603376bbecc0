"""TRUSTEE's curriculum: tasks in simulated worlds get harder while the student succeeds, and easier while it fails.

    D <- min(D + rise, 100)   if the mean reward of a step's episodes is above `upper` (0.5)
    D <- max(D - rise, 1)     if it is below `lower` (0)

Before a step, the environment's simulator writes one task for each prompt, at levels drawn from D
(`opd_zoo.environments.simulated_task`), and all answers to the prompt play that task. If no task can be written, the
episodes of the prompt break; they are then neither trained on nor counted in the mean. With `batches` above 1, the mean
is over that many steps, and starts again when D changes. Evaluations play at `difficulty` of the options. Rank 0 asks
for all ranks. Source: arXiv 2604.17739 (text: thresholds, 3 of 100, softness 0.5; 16 tasks x 8 answers, GRPO by token).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import Field, model_validator

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.chat import ChatClient, ChatSettings
from opd.tasks.environments.base import ENVIRONMENT
from opd_zoo.environments.simulated import CASE, LEVELS, TASK, offered
from opd_zoo.environments.simulated_task import EASIEST, HARDEST, SimulatorFailed, draw_levels, make_task
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.outcome import Outcome
    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_TAG = "difficulty"


class TrusteeSettings(ControllerSettings):
    """Settings of the curriculum."""

    first: float = Field(EASIEST, ge=EASIEST, le=HARDEST, description="Difficulty D of the first step.")
    rise: float = Field(3.0, gt=0, description="Amount by which D rises or falls.")
    upper: float = Field(0.5, ge=-1, le=1, description="Mean reward above which D rises.")
    lower: float = Field(0.0, ge=-1, le=1, description="Mean reward below which D falls.")
    softness: float = Field(
        0.5, ge=0, le=1, description="Probability that an aspect of a task is drawn below the level that D allows."
    )
    batches: int = Field(1, ge=1, description="Number of steps over whose episodes the mean reward is taken.")
    workers: int = Field(16, ge=1, le=256, description="Maximum number of tasks written at the same time.")
    seed: int = Field(0, ge=0, description="Seed of the levels of tasks.")

    @model_validator(mode="after")
    def _order(self) -> TrusteeSettings:
        if self.lower > self.upper:
            raise ValueError(f"lower is {self.lower:g}, above upper {self.upper:g}; swap them")
        return self


class Trustee(Controller[TrusteeSettings]):
    """Makes simulated tasks harder as the student succeeds (TRUSTEE).

    Its state is D and the mean rewards of the last steps.
    """

    traits = Traits(works_ahead=True, tags={_TAG: CASE})

    def __init__(self, settings: TrusteeSettings) -> None:
        super().__init__(settings)
        self.difficulty = float(settings.first)
        self.history: list[float] = []
        self._clients: dict[str, ChatClient] = {}

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse recipes in which D could not fall.

        Raises:
            ConfigError: naming the reward to add.
        """
        names = [str(entry.get("name", "")).rpartition(":")[2] for entry in recipe.rewards]
        if "trustee" not in names:
            raise ConfigError("method trustee needs rewards in [-1, 1]; add reward trustee.")

    def plan(self, plan: StepPlan) -> StepPlan:
        """Give each simulated prompt its levels and its task, the same for all its answers."""
        prompts = {row.key.uid: row.prompt for row in plan.rows if CASE in row.prompt.extra}
        levels = {uid: self._levels(plan.step, uid) for uid in prompts}
        # Every rank plans the whole step. Only rank 0 asks, because a model may answer differently when asked twice.
        own = uuid4().hex
        tasks: dict[str, Any] = {}
        if self.services.gather(own)[0] == own:
            with ThreadPoolExecutor(self.settings.workers) as threads:
                found = threads.map(lambda uid: self._task(prompts[uid], levels[uid]), prompts)
                tasks = dict(zip(prompts, found, strict=True))
        tasks = self.services.gather(tasks)[0]
        rows = []
        for row in plan.rows:
            uid = row.key.uid
            if uid in prompts:
                extra = {**row.prompt.extra, LEVELS: levels[uid], TASK: tasks[uid]}
                tags = {**row.tags, _TAG: f"{self.difficulty:g}"}
                row = replace(row, prompt=replace(row.prompt, extra=extra), tags=tags)  # noqa: PLW2901
            rows.append(row)
        return replace(plan, rows=tuple(rows))

    def _levels(self, step: int, uid: str) -> dict[str, int]:
        """The levels of a prompt, drawn from its own random stream."""
        uniform = stream(self.settings.seed, "trustee", step, uid).random
        return draw_levels(self.difficulty, self.settings.softness, lambda: float(uniform()))

    def _task(self, prompt: Prompt, levels: Mapping[str, int]) -> dict[str, Any] | str:
        """The task of a prompt, or the reason why there is none."""
        # Only the simulator's options, because a custom environment on top of it may have further ones.
        simulator = prompt.extra[ENVIRONMENT]["options"]["simulator"]
        settings = parse_settings(ChatSettings, simulator, source="options.simulator")
        client = self._clients.setdefault(settings.model_dump_json(), ChatClient(settings))
        try:
            return make_task(client, prompt.extra[CASE], offered(prompt.extra, levels), levels)
        except SimulatorFailed as error:
            return str(error)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note the rows whose task could not be written."""
        for row in rows:
            if _TAG in row.tags:
                row.notes["task_failed"] = float(isinstance(row.prompt.extra.get(TASK), str))
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics trustee/*: D, shares of episodes without a task, aborted and unjudged, and questions asked."""
        played = [outcome for outcome in services.outcomes if _TAG in outcome.tags]
        if not played:
            return {}
        ended = [outcome.tags.get("ended", "") for outcome in played]
        found = {
            "difficulty": float(played[0].tags[_TAG]),
            "tasks_failed": sum(outcome.notes.get("task_failed", 0.0) for outcome in played) / len(played),
            "aborted": sum(word.startswith("broken") for word in ended) / len(played),
            "unjudged": sum(word == "done" for word in ended) / len(played),
            "simulator_questions": _total(played, "simulator_questions/"),
        }
        return {f"trustee/{name}": value for name, value in found.items()}

    def observe(self, report: StepReport) -> None:
        """Update D by the mean reward of the episodes that have a reward."""
        known = [o.reward for o in report.outcomes if _TAG in o.tags and o.reward is not None]
        if not known:
            return
        self.history = [*self.history, math.fsum(known) / len(known)][-self.settings.batches :]
        if len(self.history) < self.settings.batches:
            return
        mean, rise = math.fsum(self.history) / len(self.history), self.settings.rise
        moved = self.difficulty + rise * (mean > self.settings.upper) - rise * (mean < self.settings.lower)
        moved = min(max(moved, float(EASIEST)), float(HARDEST))
        if moved != self.difficulty:
            self.difficulty, self.history = moved, []

    def state_dict(self) -> dict[str, Any]:
        """D and the mean rewards."""
        return {"difficulty": self.difficulty, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.difficulty, self.history = float(state["difficulty"]), [float(value) for value in state["history"]]


def _total(played: Sequence[Outcome], prefix: str) -> float:
    """The sum, over episodes and turns, of what environments measured under a name."""
    return math.fsum(value for o in played for name, value in o.notes.items() if name.startswith(prefix))
