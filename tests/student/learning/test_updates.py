"""Epochs and minibatches: which rows an update gets, on one rank and on several."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rows import make_row

from opd.errors import NonFiniteError
from student.data.costs import Costs
from student.data.row import Row, RowKey
from student.learning.updates import Update, Updated, make_updates, plan_updates


class Told:
    """Ranks of which this one knows what the others say."""

    def __init__(self, others: Sequence[object] = ()) -> None:
        self.others = others

    def gather(self, value: object) -> list[object]:
        return [value, *self.others]


def row(uid: str, sample: int) -> Row:
    return make_row(prompt=uid, key=RowKey(3, uid, sample))


ROWS = [row(uid, sample) for uid in ("e", "a", "d", "b", "c") for sample in range(3)]


def planned(rows: Sequence[Row], others: Sequence[Row] = (), **keywords: int) -> list[Update]:
    told = Told([list(dict.fromkeys(r.key.group for r in others))] if others else [])
    return list(plan_updates(rows, **{"seed": 0, "step": 3, **keywords}, ranks=told))  # type: ignore[arg-type]


def test_one_epoch_of_one_minibatch_is_one_update_on_the_rows_as_they_are() -> None:
    assert planned(ROWS, epochs=1, minibatches=1) == [Update(tuple(ROWS))]


@pytest.mark.parametrize("minibatches", [2, 3, 5])
def test_minibatches_are_whole_groups_and_every_epoch_sees_every_row_once(minibatches: int) -> None:
    updates = planned(ROWS, epochs=2, minibatches=minibatches)
    assert len(updates) == 2 * minibatches
    for update in updates:
        assert all(sum(r.key.group == one.key.group for r in update.rows) == 3 for one in update.rows)
    for epoch in (updates[:minibatches], updates[minibatches:]):
        assert {id(r) for update in epoch for r in update.rows} == {id(r) for r in ROWS}
        assert sum(len(update.rows) for update in epoch) == len(ROWS)


def test_the_order_is_another_in_every_epoch_and_step_and_the_same_when_asked_again() -> None:
    def keys(**keywords: int) -> list[list[tuple[str, int]]]:
        return [[(r.key.uid, r.key.sample) for r in update.rows] for update in planned(ROWS, **keywords)]

    once = keys(epochs=3, minibatches=5)
    assert once == keys(epochs=3, minibatches=5)
    assert once[:5] != once[5:10] != once[10:]
    assert once != keys(epochs=3, minibatches=5, step=4)
    assert once != keys(epochs=3, minibatches=5, seed=1)


@pytest.mark.parametrize("minibatches", [2, 3, 5])
def test_ranks_cut_the_groups_of_all_of_them(minibatches: int) -> None:
    """However rows are spread, each minibatch holds the same rows; a rank without any of them gives an empty one."""
    alone = planned(ROWS, epochs=2, minibatches=minibatches)
    first, second = ROWS[:3], ROWS[3:]
    one = planned(first, second, epochs=2, minibatches=minibatches)
    other = planned(second, first, epochs=2, minibatches=minibatches)
    assert len(one) == len(other) == len(alone)
    for whole, a, b in zip(alone, one, other, strict=True):
        assert {id(r) for r in whole.rows} == {id(r) for r in (*a.rows, *b.rows)}
    assert any(not update.rows for update in one)


def test_an_update_without_a_row_to_learn_from_is_skipped_and_costs_nothing(bench: Callable[..., Any]) -> None:
    made = bench()
    rows = made.rows()
    left_out = [row for row in rows if row.key.sample == 0]
    for row in left_out:
        row.trained = False
    costs = Costs()
    updates = [Update(tuple(left_out)), Update(tuple(rows))]
    found = make_updates(made.learner, updates, 0, costs, lambda rows: {})
    assert (found.made, found.skipped) == (1, 1)
    assert costs.take() == {"cost/train/gradient_positions": sum(len(row.prompt_ids) + row.length for row in rows)}


def test_metrics_of_updates_add_up_and_an_update_that_asks_for_it_is_read_again_first(
    bench: Callable[..., Any],
) -> None:
    made, by_hand = bench(), bench()
    rows = made.rows()
    parts = [tuple(rows[:4]), tuple(rows[4:])]
    read = []

    def reread(rows: Sequence[Row]) -> dict[str, int]:
        read.append((rows, made.learner.updates))
        return {"student": 7}

    costs, updates = Costs(), [Update(parts[0]), Update(parts[1], recompute=True)]
    found = make_updates(made.learner, updates, 0, costs, reread)
    first, second = (by_hand.learner.update(part, 0) for part in parts)
    assert read == [(parts[1], 1)] and costs.take()["cost/train/student_positions"] == 7
    expected = {name: (top + second[name][0], bottom + second[name][1]) for name, (top, bottom) in first.items()}
    assert found.sums == expected and (found.made, found.skipped, found.failure) == (2, 0, None)
    means = {name: top / bottom for name, (top, bottom) in expected.items() if bottom}
    assert found.metrics() == means | {"updates": 2.0, "updates_skipped": 0.0}


def test_a_metric_without_a_measurement_is_absent() -> None:
    found = Updated({"loss/a": (3.0, 2.0), "never": (0.0, 0.0)}, made=2, skipped=1)
    assert found.metrics() == {"loss/a": 1.5, "updates": 2.0, "updates_skipped": 1.0}


def test_a_failure_is_raised_before_the_first_update_and_kept_after_it(bench: Callable[..., Any]) -> None:
    made = bench()
    rows = made.rows()
    good, bad = Update(tuple(rows[:4])), Update(tuple(rows[4:]))
    for row in bad.rows:
        row.weight = math.inf
    with pytest.raises(NonFiniteError):
        make_updates(made.learner, [bad, good], 0, Costs(), lambda rows: {})
    found = make_updates(made.learner, [good, bad, good], 0, Costs(), lambda rows: {})
    assert isinstance(found.failure, NonFiniteError) and found.made == 1
