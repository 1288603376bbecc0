"""The baseline of prompt samplers: as many candidates as they have, and a random choice.

    score ~ U(0, 1)

A sampler has shown an effect only if it beats this one at the same `candidates`, since drawing more prompts also moves
a run faster through its table. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd_zoo.samplers.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt


class RandomPrompts(Sampler):
    """A null arm: chooses prompts at random."""

    evidence = "own"
    remembers = False

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """A uniform random score for each prompt."""
        return [float(value) for value in rng.random(len(pool))]
