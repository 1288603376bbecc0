"""ScaleRL's retirement: prompts that are solved often enough are never drawn again.

    retired   once the success rate of a prompt, when it was last answered, is at least `limit`

`candidates` bounds how far a step reads on for prompts that are not retired; a step that finds too few is smaller.
Source: ScaleRL, arXiv 2510.13786 (text: pass rate 0.9, no positive resampling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.samplers.base import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan
    from student.data.report import StepReport


class RetireSettings(SamplerSettings):
    """Settings of the retirement."""

    limit: float = Field(0.9, gt=0, le=1, description="Success rate from which on a prompt is retired.")


class Retire(Sampler[RetireSettings]):
    """Never draws a prompt again that was solved often enough (ScaleRL).

    Its state is the retired prompts.
    """

    evidence = "text"

    def __init__(self, settings: RetireSettings) -> None:
        super().__init__(settings)
        self.retired: set[str] = set()

    def knows(self, prompt: Prompt) -> bool:
        """Whether the prompt is retired."""
        return self.arm(prompt) in self.retired

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The first prompts that are not retired; the score is the share of the pool that is."""
        live = [prompt for prompt in pool if not self.knows(prompt)]
        return [(prompt, 1.0 - len(live) / len(pool)) for prompt in live[:count]]

    def observe(self, report: StepReport) -> None:
        """Retire what the step solved."""
        for arm, groups in self.results(report.outcomes).items():
            values = [value for group in groups for value in group]
            if sum(values) / len(values) >= self.settings.limit:
                self.retired.add(arm)

    def state_dict(self) -> dict[str, Any]:
        """The retired prompts."""
        return {"retired": sorted(self.retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.retired = {str(arm) for arm in state["retired"]}
