"""How the rows of a step are cut into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import make_row

from student.data.batch import split


@pytest.mark.parametrize("shortest_first", [False, True])
@given(lengths=st.lists(st.integers(1, 30), max_size=12), budget=st.integers(1, 120))
def test_every_row_is_in_one_micro_batch_within_the_budget_in_the_order_of_lengths(
    lengths: list[int], budget: int, shortest_first: bool
) -> None:
    rows = [make_row(length, sample=sample) for sample, length in enumerate(lengths)]
    parts = split(rows, budget, turn=None, shortest_first=shortest_first)
    order = [index for part in parts for index in part]
    sign = 1 if shortest_first else -1
    assert order == sorted(range(len(rows)), key=lambda index: (sign * rows[index].longest, index))
    for part in parts:
        assert len(part) == 1 or len(part) * max(rows[index].longest for index in part) <= budget


def test_rows_of_a_slow_teacher_hold_up_no_shorter_rows_of_another() -> None:
    rows = [
        make_row(length, sample=sample, teacher=teacher)
        for sample, (length, teacher) in enumerate([(20, "a"), (4, "a"), (8, "b"), (30, "b")])
    ]
    assert split(rows, 1, turn=None, by_teacher=True, shortest_first=True) == [[1], [2], [0], [3]]


@pytest.mark.parametrize("shortest_first", [False, True])
def test_rows_beyond_a_turn_share_no_micro_batch_with_shorter_ones(shortest_first: bool) -> None:
    rows = [make_row(length, sample=sample) for sample, length in enumerate([5, 9, 7, 8, 6])]
    turn = rows[2].longest
    parts = split(rows, 1000, turn=turn, shortest_first=shortest_first)
    assert sorted(map(sorted, parts)) == [[0, 2, 4], [1, 3]]
