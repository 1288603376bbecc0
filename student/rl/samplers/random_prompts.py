"""The null of prompt samplers: as many candidates as they have, and a random choice.

    score ~ U(0, 1)

A sampler has shown something only where it beats this at the same `candidates`, since drawing more also moves a run
faster through its table. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from student.rl.samplers.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt


class RandomPrompts(Sampler):
    """The sampler; see the module. It has no state."""

    evidence = "own"
    remembers = False

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """See the module."""
        return [float(value) for value in rng.random(len(pool))]
