"""DRIVE (Pre-GRPO): phases that each keep the hardest prompts of the phase before, with more answers to each.

    set of a phase = the `keep` share of the set before it with the lowest success rates,   ties by name
    answers to a prompt = `samples` of the phase

A set holds prompts, or with `by` domains or values of a column; their names are the uids, the domains or the values.
Phases begin at given steps; before the first one all prompts are used. Prompts outside the set are skipped, and
`candidates` bounds how far a step reads on; if it does not find enough, the hardest of the others fill the step (metric
drive/inside). Source: arXiv 2511.06307 (text; its thresholds are not stated, those here are ours). Its first stage, on
many easy prompts with 8 answers, is the run before the first phase; its hard stage has 64 answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from opd.config import Settings
from opd_zoo.samplers.base import RateSampler, SamplerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport


class Phase(Settings):
    """A phase of the curriculum."""

    step: int = Field(ge=1, description="Step with which the phase begins.")
    keep: float = Field(
        1 / 3, gt=0, lt=1, description="Share of the previous phase's set, the hardest prompts, that it keeps."
    )
    samples: int | None = Field(
        None, ge=1, description="Number of answers to a prompt; null means rollout.samples_per_prompt."
    )


class DriveSettings(SamplerSettings):
    """Settings of DRIVE."""

    phases: list[Phase] = Field(
        default_factory=lambda: [Phase(step=100)], min_length=1, description="Phases in the order of their steps."
    )

    @field_validator("phases")
    @classmethod
    def _order(cls, phases: list[Phase]) -> list[Phase]:
        steps = [phase.step for phase in phases]
        if steps != sorted(set(steps)):
            raise ValueError(f"phases begin at steps {steps}, which must increase")
        return phases


class Drive(RateSampler[DriveSettings]):
    """Phases that keep the hardest prompts, with more answers to each (DRIVE's Pre-GRPO).

    Its state is the success rates and the set of the phase.
    """

    evidence = "text"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, begins={"a phase": max(phase.step for phase in self.settings.phases)})

    def __init__(self, settings: DriveSettings) -> None:
        super().__init__(settings)
        self.kept: list[str] | None = None
        self.entered = 0

    def phase(self, step: int) -> int:
        """How many phases have begun at a step."""
        return sum(step >= phase.step for phase in self.settings.phases)

    def draw(self, planned: Sequence[Prompt], step: int) -> list[Prompt]:
        """The pool; only the planned prompts while there is no set."""
        return list(planned) if self.kept is None else super().draw(planned, step)

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """The set in random order, then the others, the hardest first; without a set the order of the pool."""
        if self.kept is None:
            return [-float(i) for i in range(len(pool))]
        inside = set(self.kept)
        found = []
        for prompt, tie in zip(pool, rng.random(len(pool)), strict=True):
            rate = self.rates.get(self.arm(prompt))
            found.append(2.0 + float(tie) if self.arm(prompt) in inside else -(1.0 if rate is None else rate))
        return found

    def rows_for(self, plan: StepPlan, prompt: Prompt) -> tuple[PlannedRow, ...]:
        """Rows of a chosen prompt, as many as the phase says."""
        phase = self.phase(plan.step)
        return self.rows_of(plan, prompt, self.settings.phases[phase - 1].samples if phase else None)

    def note(self, plan: StepPlan, prompt: Prompt, **values: float) -> None:
        """Also note whether the prompt is in the set."""
        inside = float(self.kept is None or self.arm(prompt) in self.kept)
        super().note(plan, prompt, inside=inside, **values)

    def observe(self, report: StepReport) -> None:
        """Update the rates, and form the set of a phase that begins with the next step."""
        super().observe(report)
        # Formed right after the last answers of the phase before: later it would also reflect the new phase's answers.
        while self.entered < self.phase(report.step + 1):
            keep = self.settings.phases[self.entered].keep
            known = sorted(self.rates.known) if self.kept is None else self.kept
            hardest = sorted(known, key=lambda arm: (self.rates.known[arm], arm))
            self.kept = sorted(hardest[: max(1, round(keep * len(hardest)))])
            self.entered += 1

    def state_dict(self) -> dict[str, Any]:
        """The rates, the set, and how many phases have formed it."""
        return {**super().state_dict(), "kept": self.kept, "entered": self.entered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.kept, self.entered = state["kept"], int(state["entered"])
