"""What groups of answers have to teach is counted as its definition says, and shown of a real student."""

from pathlib import Path
from typing import Any

import pytest

from opd_lab.experiments import load_experiment
from opd_lab.groups_premise import by_kind, in_groups, measure, shortest_over_longest
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels


def answer(uid: str, verdict: str, tokens: int, domain: str = "sums") -> dict[str, Any]:
    return {"uid": uid, "verdict": verdict, "tokens": tokens, "domain": domain}


ANSWERS = [
    *(answer("a", "correct", tokens) for tokens in (4, 8)),
    answer("a", "wrong", 2),
    *(answer("b", "correct", 6, "words") for _ in range(2)),
    *(answer("c", "wrong", 9) for _ in range(3)),
]


def test_groups_are_those_of_a_prompt_and_kinds_are_domains() -> None:
    groups = in_groups(ANSWERS)
    assert [len(group) for group in groups] == [3, 2, 3]
    assert by_kind(groups) == {"sums": pytest.approx(1 / 3), "words": 1.0}


def test_lengths_are_compared_among_right_answers_of_a_group() -> None:
    assert shortest_over_longest(in_groups(ANSWERS)) == pytest.approx((4 / 8 + 6 / 6) / 2)
    assert shortest_over_longest(in_groups(ANSWERS[2:3])) is None


def test_a_premise_is_absent_where_any_of_its_bounds_is_missed(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    plan = ExperimentPlan(load_experiment("rl_losses"), "quick", tmp_path, {0: WorldModels(summary, "quick")})
    found = measure(plan, 0)
    assert found.present and "parity 0." in found.numbers and "mixed " in found.numbers
    assert not measure(plan, 0, mixed=1.01).present
    assert not measure(plan, 0, equal=1.01).present
    assert not measure(plan, 0, apart=0.01).present
    assert not measure(plan, 0, shorter=0.01).present
