"""A metric of training counts by the last quarter of the steps."""

import math

import pytest

from opd_lab.results import late_mean


def test_the_last_quarter_of_the_steps_counts() -> None:
    records = [{"entropy": float(step)} for step in range(8)]
    assert late_mean(records, "entropy") == pytest.approx(6.5)
    assert late_mean(records[:3], "entropy") == pytest.approx(2.0)


def test_steps_without_the_metric_are_left_out_and_one_in_none_is_not_known() -> None:
    records = [{"entropy": 1.0}, {"entropy": 2.0}, {}, {"entropy": None}] * 2
    assert math.isnan(late_mean(records, "entropy"))
    assert math.isnan(late_mean(records, "length"))
    assert late_mean([*records, {"entropy": 4.0}], "entropy") == pytest.approx(4.0)
