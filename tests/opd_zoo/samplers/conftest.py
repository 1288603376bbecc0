"""A run without a model: a table of prompts of known difficulty, a sampler, and what becomes of the rows it plans."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind, Scores
from opd_zoo.samplers.base import SignalController
from student.data.needs import TEACHER
from student.data.outcome import Outcome, outcome_of
from student.data.plan import PlannedRow, StepPlan, plan_step
from student.data.report import StepReport
from student.data.row import Row
from student.data.streams import stream
from student.plugin.controllers import CONTROLLERS, Controller, begin
from student.settings.recipe import Recipe

TABLE = [
    Prompt.make(
        f"{'9' * (1 + i % 4)}+{i}=", answer="0", domain=("easy", "middle", "hard")[i % 3], extra={"depth": 1 + i % 3}
    )
    for i in range(48)
]
RATES = {prompt.uid: (0.95, 0.5, 0.05)[i % 3] for i, prompt in enumerate(TABLE)}
PER_STEP, SAMPLES = 6, 4


class Run:
    """The loop's side of a method.

    Args:
        name: of the method.
        settings: its settings.
        signal: "reward", or "divergence" for rows with a teacher's log-probs and no verdict.
    """

    def __init__(self, name: str, signal: str = "reward", **settings: Any) -> None:
        cls = CONTROLLERS.load(name)
        self.signal = signal
        self.recipe = parse_settings(
            Recipe,
            {
                "run": "unused",
                "model": {"path": "unused"},
                "prompts": {"task": "addition"},
                "rollout": {"prompts_per_step": PER_STEP, "samples_per_prompt": SAMPLES, "max_new_tokens": 8},
            },
        )
        learns = {"signal": signal} if issubclass(cls, SignalController) else {}
        self.method: Controller = cls(parse_settings(cls.settings_type, {"name": name, **learns, **settings}))
        self.method.check(self.recipe, [])
        self.position = self.taken = self.step = 0
        self.outcomes: list[Outcome] = []
        begin(self.method, self)  # type: ignore[arg-type]

    def tokenizer(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
        return {"input_ids": list(text.encode()) if isinstance(text, str) else [list(one.encode()) for one in text]}

    def read(self, items: Sequence[Any], *arguments: Any, **options: Any) -> list[Scores]:
        """Hidden states that tell how long a prompt is, and nothing else."""
        return [Scores(hidden=np.array([[item.prompt_length / 4 - 1, 1.0]], np.float32)) for item in items]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def prompts(self, count: int) -> list[Prompt]:
        start = self.position + self.taken
        self.taken += count
        return [TABLE[(start + i) % len(TABLE)] for i in range(count)]

    def plan(self) -> StepPlan:
        """The plan of the step, from the beginning of it."""
        self.taken = 0
        plan = plan_step(self.step, self.prompts(PER_STEP), samples=SAMPLES, max_new_tokens=8, temperature=1.0)
        return self.method.plan(plan)

    def rows(self, plan: StepPlan) -> list[Row]:
        return [self._row(planned) for planned in plan.rows]

    def _row(self, planned: PlannedRow) -> Row:
        row = make_row(3, key=planned.key, prompt=planned.prompt, behaviour=-0.5, text="0", tags=planned.tags)
        lucky = stream(7, planned.key.step, planned.key.uid, planned.key.sample).random() < RATES[planned.key.uid]
        if self.signal == "reward":
            row.verdict = Verdict.of(bool(lucky))
        else:
            gap = np.float32(0.05 if lucky else 3.0)
            row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=row.behaviour_logp - gap)
        return row

    def finish(self, plan: StepPlan) -> dict[str, float]:
        """Everything after the rollout; returns the method's metrics."""
        rows = self.method.compose(self.rows(plan))
        self.outcomes = [outcome_of(row) for row in rows]
        metrics = self.method.after_update(self.step, self)  # type: ignore[arg-type]
        self.method.observe(StepReport(self.step, {}, self.outcomes))
        self.position, self.taken, self.step = self.position + self.taken, 0, self.step + 1
        return metrics

    def go(self, steps: int) -> list[dict[str, float]]:
        return [self.finish(self.plan()) for _ in range(steps)]


@pytest.fixture
def run() -> Callable[..., Run]:
    return Run


@pytest.fixture
def rate() -> Callable[[Prompt], float]:
    return lambda prompt: RATES[prompt.uid]
