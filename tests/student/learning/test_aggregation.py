"""How token losses are averaged: worked examples of every aggregation, episodes, strata, schedules of weights."""

import dataclasses
from typing import Any

import pytest
import torch

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.verdict import Verdict
from student.data.outcome import gather_outcomes
from student.data.row import RowKey
from student.data.token_batch import TokenBatch
from student.learning.objective import Objective
from student.plugin.terms import Term, TermOutput, TermSettings, build_terms

CPU = torch.device("cpu")


class Given(Term):
    """The loss of every token is its row's reward."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        return TermOutput(batch.of_rows([row.reward or 0.0 for row in batch.rows]).double())


def loss(made: Any, term: Term, limit: int = 8) -> float:
    objective = Objective([term], limit)
    objective.assess(made.rows, *gather_outcomes(made.rows))
    weights = objective.position_weights(made.rows, CPU)
    return float(objective.loss(made.batch(), weights)[0])


def given(**settings: Any) -> Given:
    return Given(TermSettings(name="given", **settings))


@pytest.fixture
def example(toy: Any) -> Any:
    """The worked example of Balanced Aggregation: losses [1], [2, 2, 2] of good rows and six times 4 of a bad one."""
    made = toy(lengths=(1, 3, 6), group=3, masked=False)
    for row, reward, sign in zip(made.rows, [1.0, 2.0, 4.0], ["good", "good", "bad"], strict=True):
        row.reward, row.tags = reward, {"sign": sign}
    return made


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"aggregation": "token_mean"}, 3.1),
        ({"aggregation": "sequence_mean"}, 7 / 3),
        ({"aggregation": "constant"}, 31 / (3 * 8)),
        ({"aggregation": "prompt_mean"}, 3.1),
        ({"aggregation": "balanced", "strata": "sign"}, 2.5),
        ({"aggregation": "balanced", "strata": "domain"}, 3.1),
    ],
)
def test_each_aggregation_of_a_worked_example(example: Any, settings: dict[str, str], expected: float) -> None:
    assert loss(example, given(**settings)) == pytest.approx(expected)


def test_a_prompt_mean_gives_every_prompt_the_same_weight(toy: Any) -> None:
    made = toy(lengths=(1, 3, 6, 2), group=2, masked=False)
    for row, reward in zip(made.rows, [1.0, 2.0, 4.0, 8.0], strict=True):
        row.reward = reward
    assert loss(made, given(aggregation="prompt_mean")) == pytest.approx((7 / 4 + 40 / 8) / 2)


def test_a_turn_mean_gives_every_turn_the_same_weight(example: Any) -> None:
    example.rows[2].turns = ((0, 2), (3, 6))
    assert loss(example, given(aggregation="turn_mean")) == pytest.approx((1 + 2 + 4 + 4) / 4)
    example.rows[1].turns = ((0, 1), (2, 3))
    assert loss(example, given(aggregation="turn_mean")) == pytest.approx((1 + 2 + 2 + 4 + 4) / 5)


def test_the_first_turns_alone_are_learnt_from_and_counted(example: Any) -> None:
    """Losses 1, 2 and 4 of rows of one, two and three turns."""
    example.rows[1].turns, example.rows[2].turns = ((0, 1), (2, 3)), ((0, 2), (3, 4), (5, 6))
    for first, aggregation, expected in [
        (1, "token_mean", (1 + 2 + 4 * 2) / 4),
        (2, "token_mean", (1 + 2 * 3 + 4 * 4) / 8),
        (3, "token_mean", 3.1),
        (1, "sequence_mean", 7 / 3),
        (1, "turn_mean", 7 / 3),
        (2, "turn_mean", (1 + 2 + 2 + 4 + 4) / 5),
        (1, "constant", (1 + 2 + 4 * 2) / (3 * 8)),
    ]:
        assert loss(example, given(first_turns=first, aggregation=aggregation)) == pytest.approx(expected)
    example.rows[0].turns = ()
    assert loss(example, given(first_turns=1)) == pytest.approx((1 + 2 + 8) / 4)


def test_a_longer_bad_response_does_not_change_the_weight_of_good_ones(toy: Any) -> None:
    found = []
    for last in (6, 12):
        made = toy(lengths=(1, 3, last), group=3, masked=False)
        for row, value in zip(made.rows, [1.0, 1.0, 0.0], strict=True):
            row.verdict = Verdict.score(value)
        (term,) = build_terms([{"name": "policy_gradient", "aggregation": "balanced", "ratio": "none"}])
        objective = Objective([term], 8)
        objective.assess(made.rows, *gather_outcomes(made.rows))
        objective.prepare(made.rows)
        found.append(objective.position_weights(made.rows, CPU)[0])
    torch.testing.assert_close(found[0][:4], found[1][:4], rtol=1e-6, atol=0)
    assert found[0][:4].tolist() == pytest.approx([2 / 3 / 4] * 4)
    assert found[1][4:].tolist() == pytest.approx([1 / 3 / 12] * 12)


def test_the_rows_of_an_episode_count_as_one_response(toy: Any) -> None:
    made = toy(lengths=(1, 3, 6), group=3, masked=False)
    for row, reward, (sample, turn) in zip(made.rows, [1.0, 2.0, 4.0], [(0, 0), (0, 1), (1, 0)], strict=True):
        row.reward = reward
        row.key = RowKey(0, row.key.uid, sample, turn)
    assert loss(made, given(aggregation="sequence_mean")) == pytest.approx((7 / 4 + 4) / 2)
    assert loss(made, given(aggregation="constant")) == pytest.approx(31 / (2 * 8))


def test_a_row_that_occurs_twice_counts_twice(toy: Any) -> None:
    made = toy(lengths=(2, 2), group=2, masked=False)
    made.rows[0].reward, made.rows[1].reward = 1.0, 4.0
    made.rows[1].key = made.rows[0].key
    assert loss(made, given(aggregation="constant")) == pytest.approx(10 / (2 * 8))


def test_a_rank_knows_the_strata_of_the_others(toy: Any) -> None:
    made, other = toy(lengths=(2, 2), group=2), toy(lengths=(2, 2), group=2)
    for row in other.rows:
        row.tags = {"mode": "long"}
    for row in made.rows:
        row.tags = {"mode": "short"}
    term = given(aggregation="balanced", strata="mode")
    assert term.settings.strata_of(gather_outcomes([*made.rows, *other.rows])[0]) == ["long", "short"]
    objective = Objective([term], 8)
    objective.assess(made.rows, gather_outcomes([*made.rows, *other.rows])[0], [0, 1])
    assert torch.isfinite(objective.position_weights([], CPU)[0]).all()


def test_a_weight_can_be_a_schedule(toy: Any) -> None:
    made = toy()
    (term,) = build_terms([{"name": "rloo", "weight": {"from": 0.5, "to": 0.1, "steps": 4}}])
    objective, found = Objective([term], 8), []
    objective.assess(made.rows, *gather_outcomes(made.rows))
    weights = objective.position_weights(made.rows, CPU)
    for step in (0, 1, 4, 9):
        objective.step = step
        total, metrics = objective.loss(made.batch(), weights)
        found.append(metrics["weight/rloo"][0])
        torch.testing.assert_close(total, metrics["weight/rloo"][0] * metrics["loss/rloo"][0])
    assert found == pytest.approx([0.5, 0.4, 0.1, 0.1])
    assert parse_settings(type(term.settings), term.settings.model_dump(mode="json")) == term.settings


def test_the_learner_tells_the_objective_the_step(bench: Any) -> None:
    made = bench({"name": "opd", "k": 8, "weight": {"from": 1.0, "to": 0.0, "steps": 4}})
    rows = made.rows()
    assert [made.step(rows, step)["weight/opd"] for step in (0, 1, 4)] == pytest.approx([1, 0.75, 0])


@pytest.mark.parametrize("weight", ["much", {"from": 0.5}, {"from": 0.5, "to": 1, "steps": 0}])
def test_a_weight_that_is_neither_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        build_terms([{"name": "rloo", "weight": weight}])


def test_an_unknown_aggregation_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="prompt_mean, turn_mean, constant, balanced"):
        build_terms([{"name": "rloo", "aggregation": "prompt"}])


def test_weights_do_not_depend_on_the_masks_of_other_rows(toy: Any) -> None:
    """Masked tokens are out of numerator and denominator, and the batch's own mask has the last word."""
    made = toy()
    term = given(aggregation="prompt_mean")
    objective = Objective([term], 8)
    weights = objective.position_weights(made.rows, CPU)
    batch = made.batch()
    assert ((weights[0] == 0) == ~batch.mask).all()
    assert float(objective.loss(dataclasses.replace(batch, mask=batch.mask & False), weights)[0]) == 0
