"""Chains of advantages: their order, credit per token, group keys, and rows that only count in statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import ConfigError, PluginError
from opd.tasks.verdict import Verdict
from student.data.outcome import Outcome, gather_outcomes
from student.data.row import Row
from student.plugin.terms import build_terms
from student.rl.advantages.base import Advantage, Credit, GroupEstimator, Modifier
from student.rl.advantages.chain import AdvantageChain

ME = "tests.student.rl.advantages.test_chain"


class Ramp(Modifier):
    """Credit that grows along the response; doubles it for the first token of this rank's rows."""

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        self.fired = {"rows": (float(len(outcomes)), 1.0)}
        return [c * np.arange(1, o.length + 1, dtype=np.float32) for o, c in zip(outcomes, credit, strict=True)]

    def refine(self, row: Row, credit: Credit) -> Credit:
        assert isinstance(credit, np.ndarray)
        return np.where(np.arange(row.length) == 0, 2 * credit, credit).astype(np.float32)


class Broken(Advantage):
    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        return {"shape": [np.ones(99, np.float32)] * len(outcomes), "count": [], "nan": [float("nan")] * len(outcomes)}[
            self.settings.group[0]
        ]

    def groups(self, outcomes: Sequence[Outcome]) -> list[list[int]]:
        return []


class Raw(GroupEstimator):
    def of_group(self, rewards: Sequence[float]) -> list[float]:
        return list(rewards)


class Ends(Raw):
    def refine(self, row: Row, credit: Credit) -> Credit:
        return credit * (np.arange(row.length) == row.length - 1).astype(np.float32)


def chain(*entries: dict[str, Any]) -> AdvantageChain:
    return AdvantageChain(list(entries), "a test")


def test_a_modifier_changes_the_credit_of_the_estimator_before_it(toy: Any) -> None:
    made = toy(lengths=(3, 2), masked=False)
    (term,) = build_terms(
        [{"name": "policy_gradient", "advantage": [{"name": "leave_one_out"}, {"name": f"{ME}:Ramp"}], "ratio": "none"}]
    )
    term.prepare(made.rows)
    output = term.token_losses(made.batch())
    live = made.behaviour
    expected = torch.tensor([2.0, 2.0, 3.0, -2.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(output.loss, -expected * live)
    assert output.metrics["Ramp/rows"] == (2.0, 1.0)
    assert output.metrics["advantage_magnitude"] == (pytest.approx(7 / 3 + 2), 2.0)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([{"name": f"{ME}:Ramp"}], "cannot come first"),
        ([{"name": "group_mean"}, {"name": "leave_one_out"}], "must come first"),
        ([], "empty list"),
        ([{"name": "group_mean"}, {}], "no name"),
        ([{"name": "group_mean"}, {"name": "sngs"}, {"name": "ace"}, {"name": "sngs"}], "twice"),
        ([{"name": "lpo"}, {"name": "outliers"}], "recompute: false"),
        ([{"name": f"{ME}:Ends"}, {"name": "sngs"}], "gives credit by token"),
        ([{"name": "grup_mean"}], "did you mean 'group_mean'"),
    ],
)
def test_chains_in_a_wrong_order_are_refused(entries: list[dict[str, Any]], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        chain(*entries)


@pytest.mark.parametrize(
    ("fault", "word"), [("shape", "shape"), ("count", "returned 0 credits"), ("nan", "not finite")]
)
def test_credit_that_is_no_credit_is_refused(fault: str, word: str) -> None:
    with pytest.raises(PluginError, match=word):
        chain({"name": f"{ME}:Broken", "group": [fault]}).estimate([Outcome(0, "u", 0, reward=1.0, length=3)])


def outcomes(*entries: tuple[str, str, float]) -> list[Outcome]:
    return [Outcome(0, uid, i, agent=agent, reward=reward) for i, (uid, agent, reward) in enumerate(entries)]


def test_the_group_key_is_a_setting() -> None:
    found = outcomes(("p", "a", 1.0), ("p", "a", 0.0), ("p", "b", 1.0), ("q", "b", 0.0))
    one = {"name": "group_mean", "scale": "none"}
    assert chain(one).estimate(found) == [0.5, -0.5, 0.0, 0.0]
    assert chain(one | {"group": ["uid"]}).estimate(found) == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0])
    assert chain(one | {"group": ["agent"]}).estimate(found) == [0.5, -0.5, 0.5, -0.5]
    assert chain(one | {"group": []}).estimate(found) == [0.5, -0.5, 0.5, -0.5]


def test_rows_out_of_training_count_in_the_statistics_and_are_not_learnt_from(toy: Any) -> None:
    made = toy(lengths=(2, 2, 2, 2), group=4, masked=False)
    for row, value in zip(made.rows, [1.0, 0.0, 0.0, 0.0], strict=True):
        row.verdict = Verdict.score(value)
    made.rows[3].trained = False
    (term,) = build_terms([{"name": "policy_gradient", "advantage": {"name": "group_mean", "scale": "none"}}])
    hidden, _ = made.gradient([term])
    assert [term.credit(row) for row in made.rows] == [0.75, -0.25, -0.25, None]
    assert (hidden[made.row == 3] == 0).all() and (hidden[made.row == 0] != 0).any()


def test_other_terms_leave_out_rows_out_of_training_too(toy: Any) -> None:
    made = toy(masked=False)
    made.rows[3].trained = False
    hidden, _ = made.gradient(build_terms([{"name": "opd", "payload": "sampled"}]))
    assert (hidden[made.row == 3] == 0).all() and (hidden[made.row == 0] != 0).any()


def test_credit_of_the_whole_batch_is_kept_for_its_parts(toy: Any) -> None:
    made = toy(masked=False)
    (term,) = build_terms([{"name": "policy_gradient", "advantage": {"name": "group_mean", "scale": "none"}}])
    term.assess(made.rows, *gather_outcomes(made.rows))
    whole = [term.credit(row) for row in made.rows]
    # A part that splits a group is judged with the statistics of the batch.
    term.prepare(made.rows[:1])
    assert [term.credit(row) for row in made.rows] == whole == [0.5, -0.5, 0.5, -0.5]


def test_rows_that_were_not_in_the_batch_are_judged_among_themselves(toy: Any) -> None:
    made, other = toy(masked=False), toy(masked=False)
    (term,) = build_terms([{"name": "policy_gradient", "advantage": {"name": f"{ME}:Raw"}}])
    term.assess(made.rows, *gather_outcomes(made.rows))
    term.prepare(other.rows[:2])
    assert [term.credit(row) for row in (*made.rows[:1], *other.rows[:3])] == [None, 1.0, 0.0, None]


def test_the_state_of_each_part_is_its_own() -> None:
    class Counter(Raw):
        seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    one, other = chain({"name": f"{ME}:Raw"}), chain({"name": f"{ME}:Raw"})
    for made, seen in ((one, 3), (other, 0)):
        counter = Counter(made.parts[0].settings)
        counter.seen = seen
        made.parts[0] = counter
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {f"{ME}:Raw": {"seen": 3}}
