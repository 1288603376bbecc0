"""Positive-negative pairing: half of a step from prompts that rarely succeed, half from prompts that rarely fail.

    p  the success rate of the prompt when it was last answered
    first half    the lowest p above 0;    second half   the highest p below 1

Prompts with p of 0 or 1 come last. The share `explore` of a step goes to prompts without a rate, because otherwise none
would ever get one. The paper forms single pairs, of which a step here holds several; its weights by rare outcome are
advantage weighted_grpo. Source: arXiv 2602.03452 (inferred from its abstract).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from opd_zoo.samplers.base import RateSampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan


class PairingSettings(SamplerSettings):
    """Settings of the pairing."""

    explore: float = Field(0.25, ge=0, le=1, description="Share of a step for prompts that have no success rate yet.")


class Pairing(RateSampler[PairingSettings]):
    """Half of a step from prompts that rarely succeed, half from prompts that rarely fail.

    Its state is the success rates.
    """

    evidence = "inferred"

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The prompts of the step; the score is the distance of p from 1/2, minus the pool's mean."""
        order = [pool[int(i)] for i in rng.permutation(len(pool))]
        rated = [(rate, prompt) for prompt in order if (rate := self.rates.get(self.arm(prompt))) is not None]
        new = [prompt for prompt in order if not self.knows(prompt)]
        useful = sorted(((rate, p) for rate, p in rated if 0.0 < rate < 1.0), key=lambda pair: pair[0])
        places = count - min(len(new), math.ceil(self.settings.explore * count))
        # As many hard as easy prompts, from the two ends of the rates.
        low, high = (places + 1) // 2, places // 2
        if len(useful) <= places:
            chosen = [prompt for _, prompt in useful]
        else:
            chosen = [prompt for _, prompt in (*useful[:low], *(useful[-high:] if high else []))]
        # Prompts whose answers are all right or all wrong give nothing to compare, so they only fill up.
        never = [prompt for rate, prompt in rated if rate in (0.0, 1.0)]
        chosen += [*new, *never][: count - len(chosen)]
        mean = math.fsum(map(self._distance, pool)) / len(pool)
        return [(prompt, self._distance(prompt) - mean) for prompt in chosen]

    def _distance(self, prompt: Prompt) -> float:
        rate = self.rates.get(self.arm(prompt))
        return 0.0 if rate is None else abs(rate - 0.5)
