"""Composition-RL's curriculum: composed prompts of growing depth, moving on when a depth is solved often enough.

    depth 1 first;   rate <- memory rate + (1 - memory) mean success of the step's prompts
    the depth grows by one, and the rate begins anew, where rate >= rise_at

`opd compose` writes prompts with their depth in column `depth`, which `prompts.keep_columns` keeps; prompts without
one have depth 1. `candidates` bounds how far a step reads on to find prompts of its depth; the nearest lower depths,
and then the higher ones, fill up what is missing (metric depth_curriculum/at_depth). The authors train each depth to
its end and go on from its checkpoint, with numbers that are not published: when to rise is ours. Source:
Composition-RL, arXiv 2602.12036 (text).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.samplers.base import Sampler, SamplerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan
    from student.data.report import StepReport


class DepthCurriculumSettings(SamplerSettings):
    """Settings of the curriculum."""

    column: str = Field("depth", description="Kept column with the prompts' depth (prompts.keep_columns).")
    deepest: int = Field(3, ge=1, description="Depth at which the curriculum stays.")
    rise_at: float = Field(0.8, gt=0, le=1, description="Smoothed success at which the next depth begins.")
    memory: float = Field(0.8, ge=0, lt=1, description="Share of the smoothed success that each step keeps.")


class DepthCurriculum(Sampler[DepthCurriculumSettings]):
    """A curriculum of composed prompts of growing depth (Composition-RL).

    Its state is the depth and its smoothed success.
    """

    evidence = "text"
    remembers = False

    @property
    def traits(self) -> Traits:
        found = super().traits
        return replace(found, columns=(*found.columns, self.settings.column))

    def __init__(self, settings: DepthCurriculumSettings) -> None:
        super().__init__(settings)
        self.depth = 1
        self.rate: float | None = None

    def depth_of(self, prompt: Prompt) -> int:
        """The depth of a prompt; 1 if its column is missing or empty."""
        return int(prompt.extra.get(self.settings.column) or 1)

    def knows(self, prompt: Prompt) -> bool:
        """Whether any prompt was answered at the present depth."""
        return self.rate is not None

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The first prompts of the present depth, then of lower depths, then of higher ones, the nearest first.

        Their score is the present depth.
        """

        def order(index: int) -> tuple[bool, int, int]:
            depth = self.depth_of(pool[index])
            return depth > self.depth, abs(depth - self.depth), index

        return [(pool[i], float(self.depth)) for i in sorted(range(len(pool)), key=order)[:count]]

    def note(self, plan: StepPlan, prompt: Prompt, **values: float) -> None:
        """Also note whether the prompt has the present depth."""
        super().note(plan, prompt, at_depth=float(self.depth_of(prompt) == self.depth), **values)

    def observe(self, report: StepReport) -> None:
        """Update the smoothed success with the step's prompts of the present depth, and go deeper if it is high."""
        mine = [o for o in report.outcomes if o.notes.get(f"{self.label}/at_depth")]
        found = [math.fsum(group) / len(group) for groups in self.results(mine).values() for group in groups]
        if not found:
            return
        mean, memory = math.fsum(found) / len(found), self.settings.memory
        self.rate = mean if self.rate is None else memory * self.rate + (1.0 - memory) * mean
        if self.rate >= self.settings.rise_at and self.depth < self.settings.deepest:
            self.depth, self.rate = self.depth + 1, None

    def state_dict(self) -> dict[str, Any]:
        """The depth and its smoothed success."""
        return {"depth": self.depth, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.depth, self.rate = int(state["depth"]), state["rate"]
