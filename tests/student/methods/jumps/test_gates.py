"""Gates: what is accepted, what is refused, and how often luck gets through."""

import numpy as np
import pytest

from student.data.report import EvalReport
from student.methods.jumps.gates import GateSettings, passes


def report(
    per_prompt: list[float | None], *, kl: float | None = None, length: float = 10, cut: float = 0
) -> EvalReport:
    known = [value for value in per_prompt if value is not None]
    return EvalReport(sum(known) / len(known), tuple(per_prompt), length, cut, kl, 0)


def test_the_paper_accepts_a_draw_and_the_code_does_not() -> None:
    same = report([1, 0, 1])
    assert not passes(GateSettings(), same, same)
    assert passes(GateSettings(strict=False), same, same)
    assert passes(GateSettings(), report([1, 1, 1]), same)
    assert not passes(GateSettings(strict=False), report([1, 0, 0]), same)


def test_the_paired_gate_asks_for_more_than_noise() -> None:
    gate = GateSettings(kind="paired", sigmas=2.0)
    before = report([0.0] * 20)
    assert not passes(gate, report([1.0] * 2 + [0.0] * 18), before)
    assert passes(gate, report([1.0] * 8 + [0.0] * 12), before)
    assert not passes(gate, before, before)


def test_the_paired_gate_counts_standard_errors_over_prompts() -> None:
    """Gains 1, 0, 0 and 1/2: mean 0.375, deviation sqrt(0.6875 / 3), so 0.375 / (deviation / 2) = 1.5667."""
    one, two = report([1.0, 0.5, 0.0, 1.0]), report([0.0, 0.5, 0.0, 0.5])
    assert passes(GateSettings(kind="paired", sigmas=1.56), one, two)
    assert not passes(GateSettings(kind="paired", sigmas=1.57), one, two)


def test_unknown_verdicts_are_left_out_of_pairs() -> None:
    gate = GateSettings(kind="paired", sigmas=0.0)
    assert passes(gate, report([1, None, 1]), report([0, 1, 1]))
    assert not passes(gate, report([None, 1]), report([0, None]))


@pytest.mark.parametrize("kind", ["accuracy", "paired"])
def test_how_often_an_equal_candidate_passes(kind: str) -> None:
    """About 46 % through the published gate at 50 prompts; a paired gate at two standard errors lets few through."""
    rng = np.random.default_rng(0)
    gate = GateSettings.model_validate({"kind": kind, "sigmas": 2.0})
    drawn = [
        (report(rng.integers(0, 2, 50).astype(float).tolist()), report(rng.integers(0, 2, 50).astype(float).tolist()))
        for _ in range(1000)
    ]
    share = sum(passes(gate, one, two) for one, two in drawn) / 1000
    assert share == pytest.approx(0.46 if kind == "accuracy" else 0.025, abs=0.04)


def test_the_label_free_gate_wants_a_lower_divergence() -> None:
    gate = GateSettings(kind="reverse_kl", gain=0.1)
    before = report([0], kl=1.0)
    assert passes(gate, report([0], kl=0.89), before)
    assert not passes(gate, report([0], kl=0.91), before)
    assert not passes(gate, report([0], kl=None), before)


@pytest.mark.parametrize(("length", "cut"), [(5, 0), (15, 0), (10, 0.1)])
def test_the_label_free_gate_sees_through_short_long_and_cut_answers(length: float, cut: float) -> None:
    gate = GateSettings(kind="reverse_kl")
    assert not passes(gate, report([0], kl=0.1, length=length, cut=cut), report([0], kl=1.0))


@pytest.mark.parametrize(
    ("length", "cut", "passed"),
    [(12.0, 0.1, True), (12.1, 0.1, False), (8.34, 0.1, True), (8.33, 0.1, False), (10, 0.15, True), (10, 0.16, False)],
)
def test_the_label_free_gate_bears_a_fifth_more_or_less_and_a_few_more_that_are_cut(
    length: float, cut: float, passed: bool
) -> None:
    gate = GateSettings(kind="reverse_kl", length_tolerance=0.2, truncation_tolerance=0.055)
    before = report([0], kl=1.0, length=10, cut=0.1)
    assert passes(gate, report([0], kl=0.5, length=length, cut=cut), before) == passed


def test_the_label_free_gate_wants_a_lower_one_also_of_negative_estimates() -> None:
    gate = GateSettings(kind="reverse_kl", gain=0.1)
    before = report([0], kl=-0.010)  # from sampled tokens, whose mean may fall below 0
    assert not passes(gate, report([0], kl=-0.0095), before)
    assert not passes(gate, report([0], kl=-0.0105), before)
    assert passes(gate, report([0], kl=-0.0115), before)
