"""SwS: first the prompts at which the student stays weak, then those of domains that have many of them.

    weak    answered at least twice, never with a success of `limit` or more, and not rising: the slope of the least
            squares line through its successes is at most 0
    score   1 for a weak prompt, 1/2 for a new one times the share of weak prompts among the known ones of its domain

Prompts that are known and not weak come last, ties in random order. In the paper a first run finds the weak prompts,
and new ones are written for their domains; here the same run does both, over a table in which such prompts may be.
Source: arXiv 2506.08989 and the released code, MasterVito/SwS (the test of weakness: 0.5 and the slope; the score is
ours).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.samplers.base import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.report import StepReport

_KEPT = 32
"""Successes of a prompt that are remembered, the newest."""


class WeakPromptsSettings(SamplerSettings):
    """Settings of SwS."""

    limit: float = Field(0.5, gt=0, le=1, description="Success that a weak prompt never reached.")


class WeakPrompts(Sampler[WeakPromptsSettings]):
    """Prefers prompts at which the student stays weak, and new ones of their domains (SwS).

    Its state is the successes of each prompt, and its domain.
    """

    evidence = "text and code"

    def __init__(self, settings: WeakPromptsSettings) -> None:
        super().__init__(settings)
        self.history: dict[str, list[float]] = {}
        self.domains: dict[str, str] = {}

    def knows(self, prompt: Prompt) -> bool:
        """Whether the prompt was answered before."""
        return self.arm(prompt) in self.history

    def weak(self, arm: str) -> bool:
        """Whether the student stays weak at a prompt."""
        found = self.history.get(arm, [])
        if len(found) < 2 or max(found) >= self.settings.limit:
            return False
        middle = (len(found) - 1) / 2
        return math.fsum((place - middle) * value for place, value in enumerate(found)) <= 1e-12

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """The score of the module's formula; less than a millionth at random breaks ties."""
        known: dict[str, list[bool]] = {}
        for arm, domain in self.domains.items():
            known.setdefault(domain, []).append(self.weak(arm))
        shares = {domain: sum(weak) / len(weak) for domain, weak in known.items()}
        noise = rng.random(len(pool)) * 1e-6
        return [self._score(prompt, shares) + float(tie) for prompt, tie in zip(pool, noise, strict=True)]

    def _score(self, prompt: Prompt, shares: dict[str, float]) -> float:
        if self.knows(prompt):
            return float(self.weak(self.arm(prompt)))
        return 0.5 * shares.get(prompt.domain or "", 0.0)

    def observe(self, report: StepReport) -> None:
        """Remember the mean success of each prompt of the step."""
        for arm, groups in self.results(report.outcomes).items():
            values = [value for group in groups for value in group]
            self.history[arm] = [*self.history.get(arm, []), math.fsum(values) / len(values)][-_KEPT:]
        for outcome in report.outcomes:
            self.domains.setdefault(self._arm_of(outcome), outcome.domain)

    def state_dict(self) -> dict[str, Any]:
        """The successes and domains."""
        return {"history": {arm: list(found) for arm, found in self.history.items()}, "domains": dict(self.domains)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.history = {str(arm): [float(value) for value in found] for arm, found in state["history"].items()}
        self.domains = {str(arm): str(domain) for arm, domain in state["domains"].items()}
