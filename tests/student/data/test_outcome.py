"""Outcomes of rows: what is told to all ranks, in which order, and what unknown rewards become (nothing)."""

import json
from typing import Any

import numpy as np
import pytest

from opd.errors import ConfigError, DataError
from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind, Scores
from student.data.outcome import Outcome, gather_outcomes, outcome_of, reward_of


class TwoRanks:
    """Ranks whose other half holds `others`."""

    count = 2

    def __init__(self, index: int, others: list[Any]) -> None:
        self.index, self.others = index, others

    def agree(self, work: Any) -> Any:
        return work()

    def gather(self, value: Any) -> list[Any]:
        theirs = [outcome_of(row) for row in self.others]
        return [value, theirs] if self.index == 0 else [theirs, value]


def test_rewards_are_the_verdict_plus_the_named_parts_and_unknown_ones_are_absent(toy: Any) -> None:
    rows = toy().rows
    rows[0].verdict, rows[0].reward_parts = Verdict.score(0.5), {"format": 0.25}
    rows[1].verdict, rows[1].reward_parts = Verdict.unknown("crash"), {"format": 0.25}
    rows[2].verdict = None
    rows[3].verdict, rows[3].reward = None, -3.0
    assert [reward_of(row) for row in rows] == [0.75, None, None, -3.0]


def test_named_parts_count_in_the_last_turn_where_rewards_are_by_turn(toy: Any) -> None:
    paid, plain = toy().rows[:2]
    for row in (paid, plain):
        row.verdict, row.reward_parts = Verdict.score(1.0), {"overlong": -0.5, "format": 0.25}
    paid.turn_rewards = (0.5, 1.0)
    assert outcome_of(paid).turns.rewards == (0.5, 0.75)
    assert outcome_of(plain).turns.rewards == ()


def test_a_reward_that_is_not_finite_is_refused_with_the_name_of_its_row(toy: Any) -> None:
    row = toy().rows[0]
    row.reward = float("nan")
    with pytest.raises(DataError, match=f"sample 0 .*{row.key.uid} is nan"):
        outcome_of(row)


def test_sums_are_over_the_trained_tokens_alone(toy: Any) -> None:
    row = toy(lengths=(4,), group=1).rows[0]
    row.loss_mask = np.array([True, False, True, False])
    row.behaviour_logp = np.array([-1.0, np.nan, -2.0, np.nan], np.float32)
    row.signals["reference", PayloadKind.SAMPLED] = Scores(sampled=np.array([-0.5, np.nan, -0.25, 7], np.float32))
    outcome = outcome_of(row)
    assert outcome.sums == {"behaviour": -3.0, "reference": -0.75}
    assert (outcome.length, outcome.tokens) == (4, 2)


def test_the_order_of_outcomes_does_not_depend_on_how_rows_are_spread(toy: Any) -> None:
    rows = toy(lengths=(4, 1, 5, 3, 2, 2), group=2).rows
    alone, places = gather_outcomes(rows)
    assert [alone[place] for place in places] == [outcome_of(row) for row in rows]
    mine, others = [rows[4], rows[5]], [rows[2], rows[3], rows[1], rows[0]]
    for index, (one, other) in enumerate([(mine, others), (others, mine)]):
        told, where = gather_outcomes(one, TwoRanks(index, other))  # type: ignore[arg-type]
        assert told == alone
        assert [told[place] for place in where] == [outcome_of(row) for row in one]


def test_outcomes_survive_json(toy: Any) -> None:
    row = toy().rows[0]
    row.tags, row.turns, row.turn_rewards, row.notes = {"mode": "a"}, ((0, 2), (3, 4)), (0.5, 1.0), {"drift": 3.0}
    outcome = outcome_of(row)
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome


def test_groups_are_formed_by_parts_of_the_key_and_by_tags() -> None:
    outcome = Outcome(3, "u", 1, turn=2, agent="b", tags={"mode": "short"})
    assert outcome.key(["uid", "turn", "mode"]) == ("u", 2, "short")
    assert outcome.key([]) == ()
    assert outcome.key(["rollout"]) == ("3/u/1",)
    with pytest.raises(ConfigError, match=r"no tag 'arm'.*mode"):
        outcome.key(["arm"])


def test_rows_that_were_sampled_under_a_hint_or_by_others_are_not_on_policy(toy: Any) -> None:
    rows = toy().rows
    rows[0].origin = "branch"
    rows[1].behaviour_prompt_ids = np.ones(3, np.uint32)
    rows[2].origin = "replay"
    assert [outcome_of(row).on_policy for row in rows] == [True, False, False, True]
