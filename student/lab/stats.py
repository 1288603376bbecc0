"""Paired seeds and bootstrap intervals.

With a handful of seeds a percentile bootstrap is narrow (it never leaves the range of the seeds seen), so every table
also gives the seeds themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with a 95 % bootstrap interval over `count` seeds."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean, 95 %.

    Args:
        values: one per seed, finite.
        seed: of the resampling.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("values is empty; give at least one")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    means = data[picks].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high), len(data))


def bootstrap_ratio(tops: Sequence[float], bottoms: Sequence[float], *, seed: int = 0) -> Interval:
    """Geometric mean of the paired ratios top / bottom, with a bootstrap interval; all values positive and finite.

    Raises:
        ValueError: for sequences of different lengths.
    """
    if len(tops) != len(bottoms):
        raise ValueError(f"tops has {len(tops)} values and bottoms {len(bottoms)}; pairs are needed")
    logs = bootstrap([float(np.log(a / b)) for a, b in zip(tops, bottoms, strict=True)], seed=seed)
    return Interval(float(np.exp(logs.mean)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.count)
