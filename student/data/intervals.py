"""Confidence intervals over paired replicates, valid for small samples.

A replicate is a pair (world seed, run seed). Two arms in the same replicate share world, prompts and random streams, so
their difference is judged. Intervals are Student's t intervals with n - 1 degrees of freedom, on logarithms for ratios.

Replicates of the same world share its models, so an interval is valid for the mean over the worlds that were built. If
the difference of the arms varies between worlds, the interval is too narrow for other worlds, although all worlds that
were built must agree (`opd_lab.verdicts`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `count` values with a two-sided t interval, at 95 % unless another level was asked for."""

    mean: float
    low: float
    high: float
    count: int


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean and two-sided t interval of independent values.

    Raises:
        ValueError: for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"values has {len(values)} entries, but an interval needs at least two")
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    half = float(stats.t.ppf(0.5 + level / 2, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data)))
    return Interval(mean, mean - half, mean + half, len(data))


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval (low, high) of the probability of a hit, from `hits` in `count` independent cases.

    Raises:
        ValueError: if there are no cases, or more hits than cases.
    """
    interval = stats.binomtest(hits, count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def paired_ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Interval:
    """Geometric mean of the paired ratios top / bottom, with its t interval. All values must be positive and finite.

    Raises:
        ValueError: for sequences of different lengths, or fewer than two pairs.
    """
    if len(tops) != len(bottoms):
        raise ValueError(f"tops has {len(tops)} values and bottoms has {len(bottoms)}; give as many of each")
    logs = t_interval([math.log(a / b) for a, b in zip(tops, bottoms, strict=True)])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.count)
