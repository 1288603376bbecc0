"""Scored rows of the test world, without a server: the engine is called in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind
from student.learner import Learner
from student.model import load_student
from student.needs import Needs
from student.objective import Objective
from student.plan import plan_step
from student.plugins import build_terms
from student.recipe import TrainSettings
from student.rollout.transformers import RolloutSpec, rollout
from student.row import Row
from student.terms import HeadWeights

PROMPTS = ["1+1=", "12+34=", "7+7=", "99+1=", "5+50="]


class Bench:
    """A student of the test world with an objective, and the means to roll out and score rows for it."""

    def __init__(self, world: Path, objective: list[dict[str, Any]], teacher: str, **train: Any) -> None:
        from accelerate import Accelerator

        from teacher_server.engines.base import EngineItem
        from teacher_server.engines.transformers import TransformersEngine

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.engine = TransformersEngine(str(world / teacher), device="cpu", deterministic=True)
        self.item = EngineItem
        student, self.tokenizer = load_student(
            str(world / "student"), dtype="float32", attention=None, gradient_checkpointing=False
        )
        self.objective = Objective(build_terms(objective), length_limit=12)
        self.needs: Needs = self.objective.needs()
        self.learner = Learner(
            student,
            self.objective,
            self.needs,
            TrainSettings(**{"steps": 10, "learning_rate": 1e-3, **train}),
            Accelerator(cpu=True),
            valid_vocab=len(self.tokenizer),
            temperature=1.0,
            head_of=self.head_of,
        )

    def head_of(self, role: str, row: Row) -> HeadWeights:
        head = self.engine.head()
        return HeadWeights(torch.from_numpy(head.weight), None, head.logit_scale, head.soft_cap)

    def rows(self, step: int = 0, samples: int = 2) -> list[Row]:
        spec = RolloutSpec(7, 64, self.needs.candidates, len(self.tokenizer), 40)
        plan = plan_step(step, [Prompt.make(p) for p in PROMPTS], samples=samples, max_new_tokens=12, temperature=1.0)
        rows = rollout(self.learner.student.lm, self.tokenizer, plan.rows, spec)
        for need in self.needs.signals:
            gather = need.spec.kind is PayloadKind.GATHER
            items = [self.item(row.score_item(gather=gather), need.spec, need.temperature) for row in rows]
            for row, scores in zip(rows, self.engine.score(items), strict=True):
                assert scores is not None
                row.signals[need.role, need.spec.kind] = scores
        return rows

    def gradient(self, rows: list[Row], **keywords: Any) -> dict[str, torch.Tensor]:
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.learner.accumulate(rows, **keywords)
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.learner.named_parameters()
        }


@pytest.fixture
def bench(world: Path) -> Callable[..., Bench]:
    def make(*objective: dict[str, Any], teacher: str = "teacher", **train: Any) -> Bench:
        return Bench(world, list(objective) or [{"name": "opd", "k": 8}], teacher, **train)

    return make
