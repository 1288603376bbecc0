"""SEC: a bandit over kinds of prompts, rewarded by how much the policy learns from each kind.

    pay of a kind   mean |A| over its answers of the step,   A = (s - mean s) / std s within a prompt
    Q <- alpha pay + (1 - alpha) Q,    a kind is drawn with probability softmax(Q / tau), its prompt uniformly

For binary rewards the pay of a prompt is 2 sqrt(p (1 - p)), largest at p = 1/2. Kinds that were never drawn have the
largest Q. Kinds are domains, or values of a kept column such as a difficulty (`by`). Source: arXiv 2505.14970
(abstract; alpha and tau are ours).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.deviation import deviation
from opd_zoo.samplers.base import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan
    from student.data.report import StepReport


class SecSettings(SamplerSettings):
    """Settings of SEC."""

    by: str = Field("domain", description="What makes prompts of one kind: their domain, or a kept column.")
    alpha: float = Field(0.5, gt=0, le=1, description="Weight of the newest pay in a kind's average.")
    tau: float = Field(1.0, gt=0, description="Temperature at which kinds are drawn.")


class Sec(Sampler[SecSettings]):
    """A bandit over kinds of prompts, rewarded by how much is learnt from each (SEC).

    Its state is Q.
    """

    evidence = "abstract"

    def __init__(self, settings: SecSettings) -> None:
        super().__init__(settings)
        self.value: dict[str, float] = {}

    def knows(self, prompt: Prompt) -> bool:
        """Whether the kind has a Q."""
        return self.arm(prompt) in self.value

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """Draw a kind and then one of its prompts, until there are enough; the score is Q minus the pool's mean."""
        best = max(self.value.values(), default=0.0)
        left: dict[str, list[Prompt]] = {}
        for prompt in pool:
            left.setdefault(self.arm(prompt), []).append(prompt)
        mean = math.fsum(self.value.get(self.arm(p), best) for p in pool) / len(pool)
        chosen = []
        for _ in range(count):
            # Sorted, so that the drawn index does not depend on the order of kinds in the pool.
            arms = sorted(left)
            weights = [math.exp((self.value.get(arm, best) - best) / self.settings.tau) for arm in arms]
            total = math.fsum(weights)
            arm = arms[int(rng.choice(len(arms), p=[weight / total for weight in weights]))]
            mine = left[arm]
            chosen.append((mine.pop(int(rng.integers(len(mine)))), self.value.get(arm, best) - mean))
            if not mine:  # the other kinds share its probability from here on
                del left[arm]
        return chosen

    def observe(self, report: StepReport) -> None:
        """Update Q with the pay of each kind."""
        for arm, groups in self.results(report.outcomes).items():
            pay = [abs(value) for group in groups for value in standardised(group)]
            new, alpha = math.fsum(pay) / len(pay), self.settings.alpha
            self.value[arm] = alpha * new + (1.0 - alpha) * self.value.get(arm, new)

    def state_dict(self) -> dict[str, Any]:
        """Q by kind."""
        return {"value": dict(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.value = {str(arm): float(value) for arm, value in state["value"].items()}


def standardised(values: Sequence[float]) -> list[float]:
    """Values minus their mean, over their population deviation; zeros if all are equal."""
    mean, width = math.fsum(values) / len(values), deviation(values, 0)
    return [(value - mean) / width if width else 0.0 for value in values]
