"""Stages of a run: which domains are learnt from, and how long answers may be, by step (AceReason-Nemotron).

    stages: [{step: 0, domains: [math], max_new_tokens: 8192}, {step: 300, domains: [code]}]

Prompts of other domains are skipped, and `candidates` bounds how far a step reads on; a step that finds too few prompts
of its domains is smaller. The paper trains on mathematics first and then on code, with limits that grow, and makes
exactly one update per batch, which is train.minibatches 1 and train.epochs 1. Source: abstract of arXiv 2505.16400.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import ConfigError
from opd_zoo.samplers.base import Sampler, SamplerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class Stage(Settings):
    """A stage of the run."""

    step: int = Field(ge=0, description="Step with which the stage begins.")
    domains: list[str] = Field(default_factory=list, description="Domains whose prompts are used; empty means all.")
    max_new_tokens: int | None = Field(
        None, ge=1, description="Maximum length of an answer in tokens; null means rollout.max_new_tokens."
    )


class StagesSettings(SamplerSettings):
    """Settings of the stages."""

    stages: list[Stage] = Field(
        default_factory=lambda: [Stage(step=0)],
        min_length=1,
        description="Stages in the order of their steps, the first at step 0.",
    )

    @field_validator("stages")
    @classmethod
    def _order(cls, stages: list[Stage]) -> list[Stage]:
        steps = [stage.step for stage in stages]
        if steps != sorted(set(steps)) or steps[0] != 0:
            raise ValueError(f"stages begin at steps {steps}, which must start at 0 and increase")
        return stages


class Stages(Sampler[StagesSettings]):
    """Stages with their own domains and answer lengths (AceReason-Nemotron)."""

    evidence = "abstract"
    remembers = False

    @property
    def traits(self) -> Traits:
        return replace(super().traits, begins={"a stage": max(stage.step for stage in self.settings.stages)})

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse limits over the recipe's, with which the handshake checks the teachers.

        Raises:
            ConfigError: with the setting to raise.
        """
        super().check(recipe, terms)
        longest = max((stage.max_new_tokens or 0) for stage in self.settings.stages)
        if longest > recipe.rollout.max_new_tokens:
            raise ConfigError(
                f"a stage of method {self.settings.name!r} has max_new_tokens {longest}, over rollout.max_new_tokens "
                f"{recipe.rollout.max_new_tokens}; raise the latter."
            )

    def stage(self, step: int) -> Stage:
        """The stage of a step."""
        return [stage for stage in self.settings.stages if stage.step <= step][-1]

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The first prompts of the stage's domains; the score is the share of the pool that was skipped."""
        domains = self.stage(plan.step).domains
        found = [prompt for prompt in pool if not domains or (prompt.domain or "") in domains]
        passed = 1.0 - len(found) / len(pool)
        return [(prompt, passed) for prompt in found[:count]]

    def rows_for(self, plan: StepPlan, prompt: Prompt) -> tuple[PlannedRow, ...]:
        """Rows of a chosen prompt, with the stage's length limit."""
        limit = self.stage(plan.step).max_new_tokens
        rows = self.rows_of(plan, prompt)
        return rows if limit is None else tuple(replace(r, max_new_tokens=min(r.max_new_tokens, limit)) for r in rows)
