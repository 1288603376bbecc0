"""The batch on which our policy losses are compared with those of other projects."""

from typing import Any

import torch

from opd.tasks.verdict import Verdict

LENGTHS = (4, 1, 5, 3, 2, 6, 3, 4)
REWARDS = (1.0, 0.0, 0.0, 0.25, 1.0, 1.0, 0.0, 1.0)
LIMIT = 8
"""Most tokens of a response."""


def off_policy(toy: Any, seed: int, spread: float) -> Any:
    """Rows of two groups whose ratios have left 1, some by far: `spread` is the deviation of their logarithms."""
    made = toy(lengths=LENGTHS, group=4, seed=seed)
    noise = torch.randn(len(made.behaviour), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made.behaviour = made.behaviour + spread * noise
    for row, reward in zip(made.rows, REWARDS, strict=True):
        row.verdict = Verdict.score(reward)
    return made
