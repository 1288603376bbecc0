"""Costs and curves from hand-written metrics."""

import math
from typing import Any

import pytest

from opd_lab.curve import Curve, Sizes, read_curve, step_flops, step_tokens


def test_every_cost_is_counted() -> None:
    record = {
        "cost/train/sampled_tokens": 10.0,
        "cost/train/expert_tokens": 7.0,
        "cost/probe/sampled_tokens": 20.0,
        "cost/gate/sampled_tokens": 30.0,
        "cost/train/decoded_positions": 1.0,
        "cost/gate/decoded_positions": 2.0,
        "cost/train/gradient_positions": 3.0,
        "cost/probe/gradient_positions": 4.0,
        "cost/train/teacher_positions": 5.0,
        "cost/train/expert_positions": 6.0,
        "cost/gate/reference_positions": 8.0,
    }
    assert step_tokens(record) == 67.0
    flops = 100 * (2 * (1 + 2) + 6 * (3 + 4)) + 1000 * 2 * (5 + 6) + 10_000 * 2 * 8
    assert step_flops(record, Sizes(student=100, teacher=1000, reference=10_000)) == flops


def test_a_curve_has_a_point_for_each_evaluation() -> None:
    records: list[dict[str, Any]] = [{"cost/train/sampled_tokens": 10.0} for _ in range(4)]
    records[1] |= {"eval/accuracy": 0.5, "eval/reverse_kl": 0.2}
    records[3] |= {"eval/accuracy": 0.8, "eval/reverse_kl": 0.1}  # the same as the summary's, and counted once
    summary = {"before": {"accuracy": 0.1, "reverse_kl": 0.9}, "after": {"accuracy": 0.8, "reverse_kl": 0.1}}
    curve = read_curve(records, summary, Sizes(1, 1, 1))
    assert curve.steps == [0, 2, 4]
    assert curve.tokens == [0.0, 20.0, 40.0]
    assert curve.accuracy == [0.1, 0.5, 0.8]
    assert curve.reverse_kl == [0.9, 0.2, 0.1]
    assert curve.at("accuracy", 30.0) == pytest.approx((0.5 + 0.8) / 2)


def made(accuracy: list[float]) -> Curve:
    count = len(accuracy)
    return Curve(list(range(count)), [100.0 * i for i in range(count)], [0.0] * count, accuracy, [None] * count)


def test_the_shorter_of_two_runs_that_learn_alike_is_no_worse_at_its_end() -> None:
    short, long = made([0.1, 0.2, 0.3, 0.4]), made([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert short.at("accuracy", 300.0) == pytest.approx(long.at("accuracy", 300.0))


def test_an_evaluation_without_a_divergence_is_no_point_of_its_curve() -> None:
    curve = Curve([0, 1, 2], [0.0, 100.0, 200.0], [0.0] * 3, [0.1, 0.2, 0.3], [0.9, None, 0.5])
    assert curve.at("reverse_kl", 100.0) == pytest.approx(0.7)


def test_the_final_value_is_the_mean_of_the_last_evaluations() -> None:
    assert made([0.0, 9.0, 0.3, 0.4, 0.5]).final("accuracy") == pytest.approx(0.4)
    assert made([0.9, 0.3]).final("accuracy") == pytest.approx(0.3)  # not the one before training
    assert math.isnan(made([0.0, 0.1]).final("reverse_kl"))


def test_the_gain_at_the_end_needs_six_evaluations() -> None:
    assert made([9.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).last_gain() == pytest.approx(0.3)
    assert math.isnan(made([9.0, 0.1, 0.2, 0.3, 0.4, 0.5]).last_gain())


def test_cost_to_a_level_is_interpolated() -> None:
    assert made([0.0, 0.2, 0.4, 0.5]).cost_to(0.3, "tokens") == pytest.approx(150.0)
    assert made([0.0, 0.25, 0.5]).cost_to(0.5, "tokens") == pytest.approx(200.0)


def test_a_single_lucky_evaluation_does_not_reach_a_level() -> None:
    assert made([0.0, 0.6, 0.2, 0.5, 0.6]).cost_to(0.5, "tokens") == pytest.approx(300.0)


def test_a_level_that_is_never_reached_costs_infinitely_much() -> None:
    assert made([0.0, 0.2, 0.4]).cost_to(0.5, "tokens") == math.inf


def test_a_fall_is_measured_from_the_highest_level_so_far() -> None:
    def fall(*accuracy: float) -> float:
        return Curve([], [], [], [*accuracy], []).fall()

    assert fall(0.1, 0.2, 0.2, 0.5) == 0.0
    assert fall(0.1, 0.6, 0.2, 0.5, 0.4) == pytest.approx(0.4)
