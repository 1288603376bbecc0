"""Verdicts on claims, from made-up curves."""

import math
from dataclasses import replace

import pytest

from opd_lab.curve import Curve
from opd_lab.evaluate import Level
from opd_lab.experiment import Claim, Fires, Replicate
from opd_lab.premises import MeasuredPremise
from opd_lab.results import ArmResult, SeedResult
from opd_lab.verdicts import JudgedClaim, by_world, judge

MORE = Claim("a is better", "a", "b", "accuracy", "more")
CHEAPER = Claim("a is cheaper", "a", "b", "tokens_to", "less")
REPLICATES = [Replicate(0, 10), Replicate(1, 10), Replicate(0, 11), Replicate(1, 11)]


def arm(name: str, finals: list[float], *, tokens: float = 100.0, fired: bool = True, gain: float = 0.0) -> ArmResult:
    seeds = []
    for replicate, final in zip(REPLICATES, finals, strict=False):
        accuracy = [0.0, *[final - gain] * 3, *[final] * 3]
        curve = Curve(
            list(range(7)), [tokens * i for i in range(7)], [float(i) for i in range(7)], accuracy, [None] * 7
        )
        seeds.append(SeedResult(replicate, curve, {}, 1.0, fired, Level(final, final)))
    return ArmResult(name, "", 1e-3, {}, seeds)


def verdict(claim: Claim, *arms: ArmResult, models=None, premises=()) -> JudgedClaim:  # type: ignore[no-untyped-def]
    return judge(claim, arms, models or {}, REPLICATES, premises)


def test_a_claim_holds_when_interval_and_worlds_are_on_its_side() -> None:
    found = verdict(MORE, arm("a", [0.5, 0.6, 0.7, 0.6]), arm("b", [0.4, 0.5, 0.5, 0.5]))
    assert found.outcome == "holds" and found.scope == "at the plateau"
    assert list(found.pairs) == ["w0-s10", "w1-s10", "w0-s11", "w1-s11"]
    assert list(found.pairs.values()) == pytest.approx([0.1, 0.1, 0.2, 0.1])


def test_equal_tokens_are_those_that_both_arms_reached() -> None:
    # The rival goes twice as far: where the arm ends, it is halfway from 0 to 0.8.
    a = arm("a", [0.5, 0.51, 0.52, 0.53])
    curve = Curve([0, 1], [0.0, 1200.0], [0.0, 1.0], [0.0, 0.8], [None, None])
    b = arm("b", [0.8] * 4)
    b = replace(b, seeds=[replace(seed, curve=curve) for seed in b.seeds])
    found = verdict(replace(MORE, measure="accuracy_at_tokens"), a, b)
    assert found.outcome == "holds" and list(found.pairs.values()) == pytest.approx([0.1, 0.11, 0.12, 0.13])
    other = verdict(replace(MORE, arm="b", rival="a", measure="accuracy_at_tokens"), a, b)
    assert list(other.pairs.values()) == pytest.approx([-0.1, -0.11, -0.12, -0.13])


def test_the_opposite_does_not_hold_and_noise_is_not_shown() -> None:
    b = arm("b", [0.4, 0.5, 0.4, 0.5])
    assert verdict(MORE, arm("a", [0.3, 0.4, 0.2, 0.4]), b).outcome == "does not hold"
    assert verdict(MORE, arm("a", [0.3, 0.6, 0.5, 0.4]), b).outcome == "not shown"


def test_three_equal_signs_do_not_make_a_claim() -> None:
    # Four differences of one sign, but so unequal that a t interval contains zero.
    assert verdict(MORE, arm("a", [0.51, 0.52, 0.51, 0.9]), arm("b", [0.5] * 4)).outcome == "not shown"


def test_worlds_that_disagree_show_nothing() -> None:
    values = dict(zip(REPLICATES, [0.5, -0.01, 0.5, -0.01], strict=True))
    assert by_world(values, ratio=False) == pytest.approx({0: 0.5, 1: -0.01})
    a = arm("a", [0.9, 0.499, 0.9, 0.499])
    assert verdict(MORE, a, arm("b", [0.5] * 4)).outcome == "not shown"


def test_a_claim_before_the_plateau_is_about_a_number_of_tokens() -> None:
    found = verdict(MORE, arm("a", [0.5, 0.6, 0.5, 0.6], gain=0.05, tokens=1000.0), arm("b", [0.1] * 4, tokens=1000.0))
    assert found.outcome == "holds" and found.scope == "at 6k tokens"


def test_without_its_premise_a_claim_that_fails_is_not_judged() -> None:
    claim = replace(MORE, premise="p")
    absent, present = (MeasuredPremise("p", "", there, {}) for there in (False, True))
    low, b = arm("a", [0.3, 0.4, 0.2, 0.4]), arm("b", [0.4, 0.5, 0.4, 0.5])
    assert verdict(claim, low, b, premises=[absent]).outcome == "premise absent"
    assert verdict(claim, low, b, premises=[present]).outcome == "does not hold"
    assert verdict(claim, arm("a", [0.8, 0.9, 0.8, 0.9]), b, premises=[absent]).outcome == "holds"


def test_a_mechanism_that_never_fired_fails_its_claims() -> None:
    found = verdict(MORE, arm("a", [0.9] * 4, fired=False), arm("b", [0.4] * 4))
    assert found.outcome == "failed" and "a never fired" in found.why


def test_missing_replicates_leave_a_claim_incomplete() -> None:
    assert verdict(MORE, arm("a", [0.9] * 3), arm("b", [0.4] * 4)).outcome == "incomplete"
    assert verdict(MORE, arm("a", [0.9] * 4), arm("b", [0.4])).outcome == "incomplete"


def test_costs_are_compared_as_ratios_and_against_a_papers_factor() -> None:
    arms = arm("a", [0.5, 0.5, 0.6, 0.6], tokens=25.0), arm("b", [0.5, 0.5, 0.6, 0.6])
    found = verdict(CHEAPER, *arms)
    assert found.outcome == "holds" and found.ratio and found.interval is not None
    assert found.interval.mean == pytest.approx(0.25)
    assert verdict(replace(CHEAPER, factor=3.0), *arms).outcome == "holds"
    assert verdict(replace(CHEAPER, factor=5.0), *arms).outcome == "does not hold"


def test_an_arm_that_never_gets_there_is_not_cheaper_and_a_rival_that_learnt_nothing_is_no_goal() -> None:
    high, low, flat = arm("b", [0.5] * 4), arm("a", [0.2] * 4, tokens=1.0), arm("b", [0.0] * 4)
    assert verdict(CHEAPER, low, high).outcome == "does not hold"
    assert verdict(CHEAPER, arm("a", [0.5] * 4), flat).outcome == "not shown"
    some = verdict(CHEAPER, arm("a", [0.2, 0.5, 0.5, 0.5]), high)
    assert some.outcome == "not shown" and "1 of 4 replicates of a never" in some.why


def test_a_rival_that_lost_its_own_level_again_is_named_and_not_the_arm() -> None:
    wobbling = arm("b", [0.5] * 4)
    for seed in wobbling.seeds[:1]:
        seed.curve.accuracy[:] = [0.0, 0.6, 0.4, 0.6, 0.4, 0.6, 0.4]
    found = verdict(CHEAPER, arm("a", [0.5] * 4), wobbling)
    assert found.outcome == "not shown" and found.why.startswith("1 of 4 replicates of b itself never")


def test_an_arm_that_falls_at_its_end_is_not_at_a_plateau() -> None:
    assert verdict(MORE, arm("a", [0.5, 0.6, 0.5, 0.6], gain=-0.05), arm("b", [0.1] * 4)).scope == "at 1k tokens"


def test_models_are_rivals_by_replicate() -> None:
    claim = replace(MORE, rival="model:t")
    levels = {replicate: Level(0.3 + 0.1 * i) for i, replicate in enumerate(REPLICATES)}
    found = verdict(claim, arm("a", [0.5, 0.5, 0.8, 0.8]), models={"t": levels})
    assert list(found.pairs.values()) == pytest.approx([0.2, 0.1, 0.3, 0.2])


def test_a_rival_may_be_a_number_a_share_of_a_level_and_a_figure_of_modes() -> None:
    mine = arm("a", [0.5, 0.6, 0.5, 0.6])
    keeps = replace(MORE, rival="model:t", share=0.5)
    found = verdict(keeps, mine, models={"t": dict.fromkeys(REPLICATES, Level(0.8))})
    assert found.outcome == "holds" and list(found.pairs.values()) == pytest.approx([0.1, 0.2, 0.1, 0.2])
    apart = replace(MORE, rival="value:1.5", measure="mode/neighbour_ratio/long")
    assert verdict(apart, mine).why == "the measure is missing"
    levels = [Level(0.5, modes={"neighbour_ratio/long": 2.0 + 0.1 * i}) for i in range(4)]
    wide = replace(mine, seeds=[replace(seed, level=level) for seed, level in zip(mine.seeds, levels, strict=True)])
    assert verdict(apart, wide).outcome == "holds"


def test_a_short_run_has_no_plateau() -> None:
    curve = Curve([0, 1], [0.0, 1.0], [0.0, 1.0], [0.0, 0.5], [None, None])
    assert math.isnan(curve.last_gain())
    assert not ArmResult("a", "", 1.0, {}, [SeedResult(REPLICATES[0], curve, {}, 1.0, True)]).at_plateau


def test_evidence_of_a_mechanism_is_looked_for_in_the_metrics() -> None:
    fires = Fires("window", "<", 8.0)
    assert fires.seen([{"window": 8.0}, {"other": 1}, {"window": 4.0}])
    assert not fires.seen([{"window": 8.0}, {"other": 1}])
