"""Shared by the critic and the readers of its values: the optimizer of small heads, and a check of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


def adamw(
    weights: NDArray[np.float64],
    moments: NDArray[np.float64],
    gradient: NDArray[np.float64],
    moved: int,
    rate: float,
    decay: float = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One step of AdamW, on the host in float64 and so the same on every rank.

    Args:
        weights: of any shape.
        moments: [2, ...] first and second moment.
        gradient: of the shape of `weights`.
        moved: how many steps this makes, from 1.
        rate: learning rate.
        decay: decoupled weight decay.

    Returns:
        Weights and moments after the step; the arguments are left as they are.
    """
    low, high = _BETAS
    first = low * moments[0] + (1 - low) * gradient
    second = high * moments[1] + (1 - high) * gradient**2
    size = np.sqrt(second / (1 - high**moved)) + _EPSILON
    return weights * (1 - rate * decay) - rate * first / (1 - low**moved) / size, np.stack([first, second])
