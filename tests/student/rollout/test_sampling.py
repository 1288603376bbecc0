"""Rollout strategies on several ranks at once: threads that exchange values, no processes."""

from collections.abc import Callable
from typing import Any

import pytest
from registered import registered
from thread_ranks import SOURCE, keys, plan, sampled, together

from opd.config import parse_settings
from opd.errors import CancelledError, OutageError
from student.data.plan import StepPlan
from student.data.row import Row
from student.plugin.strategy import STRATEGIES, Single, Strategy, StrategySettings
from student.rollout.sampling import Sampling
from student.rollout.strategies.dynamic_sampling import DynamicSampling, DynamicSamplingSettings


def dynamic(**settings: Any) -> Callable[[], Strategy]:
    return lambda: DynamicSampling(DynamicSamplingSettings(name="dynamic_sampling", **settings))


def test_single_takes_every_planned_row_once() -> None:
    ((rows, sampling, cursor),) = together(1, lambda: Single(StrategySettings(name="single")))
    assert [row.key for row in rows] == [row.key for row in plan(SOURCE.prompts("train", 4)).rows]
    assert sampling.rounds == 1 and len(sampling.rows) == 8 and cursor.taken == 4


@pytest.mark.parametrize("draw", ["batch", "missing"])
def test_dynamic_sampling_fills_the_batch_with_groups_that_prefer_something(draw: str) -> None:
    ((rows, sampling, cursor),) = together(1, dynamic(rounds=20, draw=draw))
    groups = {row.key.group for row in rows}
    assert len(groups) == 4 and len(rows) == 8
    for group in groups:
        assert len({row.verdict.value for row in rows if row.key.group == group}) == 2
    assert sampling.rounds > 1 and len(sampling.rows) == 2 * cursor.taken > 8
    # Models are asked about what is learnt from, and about nothing else.
    assert sampling._scorer.asked == sampling.scored and {id(row) for row in sampling.scored} == {
        id(row) for row in rows
    }
    assert sampling.metrics(sampling.counts())["dynamic_sampling/filled"] == 1.0


def test_dynamic_sampling_learns_from_fewer_groups_when_its_rounds_are_over() -> None:
    ((rows, sampling, _),) = together(1, dynamic(rounds=2), reward=lambda p: sampled(p, 0.0))
    assert rows == [] and sampling.rounds == 2
    assert sampling.metrics(sampling.counts())["dynamic_sampling/filled"] == 0.0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("draw", ["batch", "missing"])
def test_ranks_choose_the_groups_that_one_alone_would(ranks: int, draw: str) -> None:
    ((alone, _, _),) = together(1, dynamic(rounds=20, draw=draw))
    parts = together(ranks, dynamic(rounds=20, draw=draw))
    assert keys([row for rows, _, _ in parts for row in rows]) == keys(alone)
    assert len({sampling.rounds for _, sampling, _ in parts}) == 1
    assert len({cursor.taken for _, _, cursor in parts}) == 1
    for rows, _, _ in parts:  # whole groups
        assert all(sum(r.key.group == row.key.group for r in rows) == 2 for row in rows)


class Uneven(Strategy):
    """Has as many further rounds as its rank's number, as long as any rank wants one."""

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        rows = sampling.score(sampling.sample(plan.rows))
        wanted = 3 * sampling._ranks.index
        while sampling.any(wanted > 0):
            rows += sampling.score(sampling.sample(sampling.again(plan.rows) if wanted > 0 else []))
            wanted -= 1
        return rows


def test_ranks_that_need_different_numbers_of_rounds_end() -> None:
    first, second = together(2, lambda: Uneven(StrategySettings(name="uneven")))
    assert first[1].rounds == second[1].rounds == 4
    assert len(first[0]) == 4 and len(second[0]) == 16
    assert len(keys(second[0])) == 16  # no two of them share a random stream


class Fails(Strategy):
    """Fails on the second rank in its second round."""

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        sampling.score(sampling.sample(plan.rows))
        sampling.any(True)
        if sampling._ranks.index == 1:
            raise OutageError("teacher 't' stayed away.")
        sampling.any(True)
        return []


def test_a_rank_that_fails_between_rounds_stops_the_others() -> None:
    first, second, third = together(3, lambda: Fails(StrategySettings(name="fails")))
    assert isinstance(second, OutageError)
    assert all(isinstance(other, CancelledError) and "rank 1 failed" in str(other) for other in (first, third))


class Parts(Strategy):
    """A faulty strategy: only the first rank asks the others."""

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        if sampling._ranks.index == 0:
            sampling.any(True)
        return []


def test_a_strategy_whose_ranks_part_company_is_an_error_and_no_wait_without_end() -> None:
    for error in together(2, lambda: Parts(StrategySettings(name="parts"))):
        assert isinstance(error, RuntimeError) and "out of step" in str(error)


def test_a_prompt_that_comes_again_stays_on_its_rank_and_gets_samples_of_its_own() -> None:
    class Again(Strategy):
        def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
            first = sampling.sample(plan.rows)
            sampling._cursor.begin()  # as if the table had begun anew
            return sampling.score(first + sampling.sample(sampling.more(4).rows))

    parts = together(2, lambda: Again(StrategySettings(name="again")))
    found = [keys(rows) for rows, _, _ in parts]
    assert len(found[0]) == len(found[1]) == 8 and not found[0] & found[1]
    assert not {uid for uid, _ in found[0]} & {uid for uid, _ in found[1]}


SETTINGS: dict[str, dict[str, Any]] = {
    "guide": {"column": "solution"},
    "rubric_guide": {"column": "solution"},
    "icpo": {"examples": ["1+1=2"]},
    "future_bridge": {"teacher": {"endpoint": "http://127.0.0.1:9", "model": "m"}},
}


@pytest.mark.parametrize("name", registered(STRATEGIES))
def test_every_strategy_takes_a_step_again_and_spreads_it_over_ranks_alike(name: str) -> None:
    def make() -> Strategy:
        cls = STRATEGIES.load(name)
        made: Strategy = cls(parse_settings(cls.settings_type, {"name": name, **SETTINGS.get(name, {})}))
        made.load_state_dict(made.state_dict())
        return made

    ((once, sampling, cursor),) = together(1, make)
    ((again, _, _),) = together(1, make)
    assert [row.key for row in again] == [row.key for row in once]
    assert {id(row) for row in once} <= {id(row) for row in sampling.rows}
    parts = together(2, make)
    assert keys([row for rows, _, _ in parts for row in rows]) == keys(once)
    assert {part.taken for _, _, part in parts} == {cursor.taken}
