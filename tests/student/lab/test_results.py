"""Verdicts on claims, from made-up curves."""

from dataclasses import replace

import pytest

from student.lab.curve import Curve
from student.lab.evaluate import Level
from student.lab.experiment import Arm, Claim, Experiment, Fires
from student.lab.results import ArmResult, SeedResult, judge

EXPERIMENT = Experiment("e", "x", "", "", (), {}, (), (Arm("a", ""), Arm("b", "")), ())
MORE = Claim("a is better", "a", "b", "accuracy", "more")
CHEAPER = Claim("a is cheaper", "a", "b", "tokens_to", "less")


def arm(name: str, finals: list[float], *, tokens: float = 100.0, fired: bool = True) -> ArmResult:
    seeds = []
    for seed, final in enumerate(finals):
        curve = Curve([0, 1, 2], [0.0, tokens, 2 * tokens], [0.0, 1.0, 2.0], [0.0, final, final], [None] * 3)
        seeds.append(SeedResult(seed, curve, {}, 1.0, 1.0, fired))
    return ArmResult(name, "", 1e-3, {}, seeds)


def test_a_claim_holds_when_the_interval_is_on_its_side() -> None:
    verdict = judge(EXPERIMENT, MORE, [arm("a", [0.5, 0.6, 0.7]), arm("b", [0.4, 0.5, 0.5])], {})
    assert verdict.outcome == "holds"
    assert verdict.seeds == pytest.approx((0.1, 0.1, 0.2))


def test_the_opposite_does_not_hold_and_noise_is_not_shown() -> None:
    assert judge(EXPERIMENT, MORE, [arm("a", [0.3, 0.3]), arm("b", [0.4, 0.5])], {}).outcome == "does not hold"
    assert judge(EXPERIMENT, MORE, [arm("a", [0.3, 0.6]), arm("b", [0.4, 0.5])], {}).outcome == "not shown"


def test_a_mechanism_that_never_fired_fails_its_claims() -> None:
    verdict = judge(EXPERIMENT, MORE, [arm("a", [0.9, 0.9], fired=False), arm("b", [0.4, 0.5])], {})
    assert verdict.outcome == "failed" and "a never fired" in verdict.why


def test_missing_seeds_leave_a_claim_incomplete() -> None:
    assert judge(EXPERIMENT, MORE, [arm("a", [0.9]), arm("b", [0.4, 0.5])], {}).outcome == "incomplete"
    assert judge(EXPERIMENT, MORE, [arm("a", [0.9, 0.9]), arm("b", [0.4])], {}).outcome == "incomplete"


def test_costs_are_compared_as_ratios() -> None:
    verdict = judge(EXPERIMENT, CHEAPER, [arm("a", [0.5, 0.5], tokens=25.0), arm("b", [0.5, 0.5])], {})
    assert verdict.outcome == "holds" and verdict.ratio and verdict.interval is not None
    assert verdict.interval.mean == pytest.approx(0.25)


def test_a_cost_can_be_held_against_a_papers_factor() -> None:
    arms = [arm("a", [0.5, 0.5], tokens=25.0), arm("b", [0.5, 0.5])]
    assert judge(EXPERIMENT, replace(CHEAPER, factor=3.0), arms, {}).outcome == "holds"
    assert judge(EXPERIMENT, replace(CHEAPER, factor=5.0), arms, {}).outcome == "does not hold"


def test_an_arm_that_never_gets_there_is_not_cheaper() -> None:
    verdict = judge(EXPERIMENT, CHEAPER, [arm("a", [0.2, 0.2], tokens=1.0), arm("b", [0.5, 0.5])], {})
    assert verdict.outcome == "does not hold"


def test_a_rival_that_learnt_nothing_is_no_goal() -> None:
    assert judge(EXPERIMENT, CHEAPER, [arm("a", [0.5, 0.5]), arm("b", [0.0, 0.0])], {}).outcome == "not shown"


def test_models_are_rivals_by_seed() -> None:
    claim = replace(MORE, rival="model:t")
    verdict = judge(EXPERIMENT, claim, [arm("a", [0.5, 0.6])], {"t": {0: Level(0.3, 0.4), 1: Level(0.5, 0.6)}})
    assert verdict.outcome == "holds" and verdict.seeds == pytest.approx((0.2, 0.1))


def test_evidence_of_a_mechanism_is_looked_for_in_the_metrics() -> None:
    fires = Fires("window", "<", 8.0)
    assert fires.seen([{"window": 8.0}, {"other": 1}, {"window": 4.0}])
    assert not fires.seen([{"window": 8.0}, {"other": 1}])
