"""MoPPS: chooses prompts whose success rate, drawn from a Beta posterior, is nearest to a target.

    rate ~ Beta(a, b) of the prompt,   a = b = 1 before it was ever answered         (Thompson sampling)
    topk       score = -(rate - target)^2
    threshold  score = 0 inside [low, high], minus the distance to it outside
    after n answers with success rate s:   a <- lam a + (1 - lam) + s n,   b <- lam b + (1 - lam) + (1 - s) n

lam below 1 forgets, because the policy moves; 0 keeps only the last answers. The authors draw 16 times the batch as
candidates. By operator precedence, their one-line update gives n = 1 the weight 8, which is not copied. Source: the
released code of arXiv 2507.04632, thu-rllab/MoPPS, as notes on it give it; the default of lam is ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd_zoo.samplers.base import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.report import StepReport


class MoppsSettings(SamplerSettings):
    """Settings of MoPPS."""

    mode: Literal["topk", "threshold"] = Field(
        "topk", description="Choose the prompts nearest to the target (topk), or those within a band (threshold)."
    )
    target: float = Field(0.5, ge=0, le=1, description="With mode topk: success rate to aim for.")
    low: float = Field(0.3, ge=0, le=1, description="With mode threshold: lower end of the band of success rates.")
    high: float = Field(0.7, ge=0, le=1, description="With mode threshold: upper end of the band of success rates.")
    lam: float = Field(
        0.5,
        ge=0,
        le=1,
        description="lambda, the share of a prompt's counts that each step keeps; below 1, old results are forgotten.",
    )


class Mopps(Sampler[MoppsSettings]):
    """Chooses prompts whose success rate, drawn from a posterior, is nearest to a target (MoPPS).

    Its state is a and b of each prompt.
    """

    evidence = "text and code"

    def __init__(self, settings: MoppsSettings) -> None:
        super().__init__(settings)
        self.counts: dict[str, tuple[float, float]] = {}

    def knows(self, prompt: Prompt) -> bool:
        """Whether the prompt was answered before."""
        return self.arm(prompt) in self.counts

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """A score for each prompt from a draw of its rate."""
        s, found = self.settings, []
        for prompt in pool:
            rate = float(rng.beta(*self.counts.get(self.arm(prompt), (1.0, 1.0))))
            outside = max(s.low - rate, rate - s.high, 0.0)
            found.append(-((rate - s.target) ** 2) if s.mode == "topk" else -outside)
        return found

    def observe(self, report: StepReport) -> None:
        """Update the posteriors with the step's results."""
        lam = self.settings.lam
        for arm, groups in self.results(report.outcomes).items():
            a, b = self.counts.get(arm, (1.0, 1.0))
            right = math.fsum(value for group in groups for value in group)
            answers = sum(map(len, groups))
            self.counts[arm] = (lam * a + (1 - lam) + right, lam * b + (1 - lam) + answers - right)

    def state_dict(self) -> dict[str, Any]:
        """The parameters a and b of each posterior."""
        return {"counts": {arm: list(pair) for arm, pair in self.counts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.counts = {str(arm): (float(a), float(b)) for arm, (a, b) in state["counts"].items()}
