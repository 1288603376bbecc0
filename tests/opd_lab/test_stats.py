"""t intervals against what is known."""

import math

import numpy as np
import pytest
from scipy import stats

from student.data.intervals import paired_ratio, share_interval, t_interval


def test_three_values_have_the_interval_of_the_textbook() -> None:
    found = t_interval([1.0, 2.0, 6.0])  # mean 3, standard deviation sqrt(7), t(0.975, 2) = 4.3027
    assert found.mean == pytest.approx(3.0)
    assert found.high - found.mean == pytest.approx(4.302653 * (7 / 3) ** 0.5, rel=1e-6) == found.mean - found.low
    assert found.count == 3


def test_it_is_scipys_interval() -> None:
    data = np.random.default_rng(0).normal(size=6)
    low, high = stats.t.interval(0.95, 5, loc=data.mean(), scale=stats.sem(data))
    found = t_interval(data.tolist())
    assert (found.low, found.high) == pytest.approx((low, high))


@pytest.mark.parametrize("count", [3, 6])
def test_the_interval_covers_the_true_mean_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(count)
    found = [t_interval(rng.normal(size=count).tolist()) for _ in range(4000)]
    assert np.mean([one.low <= 0 <= one.high for one in found]) == pytest.approx(0.95, abs=0.012)


def missed(between: float, apart: float = 0.0) -> float:
    """How often the interval of six replicates in two worlds misses a difference of 0 over all worlds.

    Args:
        between: variance of the difference between worlds, over that between runs in one.
        apart: how far the two worlds lie from 0, one on either side.
    """
    rng = np.random.default_rng(0)
    worlds = rng.normal(size=(4000, 2, 1)) * between**0.5 + np.array([[[apart], [-apart]]])
    found = [t_interval(one.ravel().tolist()) for one in worlds + rng.normal(size=(4000, 2, 3))]
    return float(np.mean([not one.low <= 0 <= one.high for one in found]))


def test_an_interval_over_two_worlds_is_right_for_their_own_mean_and_narrow_for_that_of_others() -> None:
    assert missed(between=0) == pytest.approx(0.05, abs=0.012)
    assert missed(between=0, apart=1) < 0.02  # wider than it need be where the two that were built differ
    assert missed(between=0.28) == pytest.approx(0.10, abs=0.015)  # the figure of docs/lab.md
    assert missed(between=1) > 0.15


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = paired_ratio([2.0, 8.0, 4.0], [1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(2.0)
    assert found.high / found.mean == pytest.approx(found.mean / found.low)
    assert found.high / found.mean == pytest.approx(math.exp(4.302653 * math.log(2) / 3**0.5))


def test_two_values_are_enough() -> None:
    assert t_interval([1.0, 3.0]).high == pytest.approx(2 + 12.7062, abs=1e-4)


def test_a_share_has_wilsons_interval_and_is_never_certain() -> None:
    z = stats.norm.ppf(0.975)
    low, high = share_interval(0, 100)
    assert low == pytest.approx(0.0, abs=1e-12) and high == pytest.approx(z**2 / (100 + z**2))
    low, high = share_interval(42, 100)
    middle, reach = (42 + z**2 / 2) / (100 + z**2), z * (42 * 58 / 100 + z**2 / 4) ** 0.5 / (100 + z**2)
    assert (low, high) == pytest.approx((middle - reach, middle + reach))


def test_unpaired_ratios_and_single_values_are_refused() -> None:
    with pytest.raises(ValueError, match="as many of each"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="two"):
        t_interval([1.0])
