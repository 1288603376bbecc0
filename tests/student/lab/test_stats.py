"""Bootstrap intervals against what is known."""

import numpy as np
import pytest

from student.lab.stats import bootstrap, bootstrap_ratio


def test_the_interval_holds_the_mean_and_stays_within_the_seeds() -> None:
    found = bootstrap([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert 1.0 <= found.low < found.mean < found.high <= 6.0
    assert found.count == 3


def test_equal_seeds_have_no_width() -> None:
    found = bootstrap([0.25] * 4)
    assert (found.low, found.mean, found.high) == (0.25, 0.25, 0.25)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = sum(found.low <= 0 <= found.high for found in (bootstrap(rng.normal(size=40).tolist()) for _ in range(100)))
    assert 85 <= hits <= 100


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = bootstrap_ratio([2.0, 8.0], [1.0, 1.0])
    assert found.mean == pytest.approx(4.0)
    assert found.low == pytest.approx(2.0) and found.high == pytest.approx(8.0)


def test_unpaired_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        bootstrap_ratio([1.0, 2.0], [1.0])


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        bootstrap([])
