"""Rows of one prompt in one micro-batch: the prompt is read once, and nothing else changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row

from student.data.prefixes import spared, split_groups
from student.learning import micro_batches
from student.learning.learner import Learner


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prompts however little that spares."""
    monkeypatch.setitem(micro_batches._LEAST_WORK, "cpu", 0)
    monkeypatch.setattr(micro_batches, "_LEAST_SHARE", 10**9)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    top = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return (top / sum(float(value.square().sum()) for value in a.values())) ** 0.5


def shared(learner: Learner, rows: list[Any]) -> float:
    """The share of positions that an update on `rows` does not read again."""
    top, bottom = (learner.accumulate(rows) or {}).get("positions_shared", (0.0, 1.0))
    return top / bottom


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("tokens", [100_000, 60, 1])
@pytest.mark.parametrize("payload", ["gather", "hidden"])
def test_a_prompt_that_is_read_once_changes_no_gradient(bench: Callable[..., Any], payload: str, tokens: int) -> None:
    term = {"name": "opd", "payload": payload, "k": 8}
    one = bench(term, micro_batch_tokens=tokens)
    rows = one.rows(samples=4)
    whole = bench(term, micro_batch_tokens=tokens, shared_prompts=False)
    assert distance(one.gradient(rows), whole.gradient(rows)) < 1e-6
    # A budget of one token gives each row a micro-batch of its own, whose prompt is its own.
    assert (shared(one.learner, rows) > 0.2) == (tokens > 1)
    assert shared(whole.learner, rows) == 0.0


@pytest.mark.usefixtures("eager")
def test_what_a_group_begins_its_responses_with_is_shared_too(bench: Callable[..., Any]) -> None:
    one, whole = bench({"name": "opd", "k": 8}), bench({"name": "opd", "k": 8}, shared_prompts=False)
    rows = [replace(row, key=replace(row.key, sample=i)) for row in one.rows(samples=1) for i in range(3)]
    assert distance(one.gradient(rows), whole.gradient(rows)) < 1e-6
    assert shared(one.learner, rows) == sum(2 * (r.longest - 1) for r in rows[::3]) / sum(r.longest for r in rows)


def test_tiny_rows_are_read_whole(bench: Callable[..., Any]) -> None:
    one = bench({"name": "opd", "k": 8})
    assert shared(one.learner, one.rows(samples=4)) == 0.0


@pytest.mark.usefixtures("eager")
def test_rows_that_a_hook_or_dropout_acts_on_are_read_whole(bench: Callable[..., Any]) -> None:
    one = bench({"name": "opd", "k": 8})
    rows = one.rows(samples=4)
    one.learner.student.dropout = True
    assert shared(one.learner, rows) == 0.0


def test_a_group_stays_together_where_the_budget_allows() -> None:
    def group(prompt: int, tokens: list[int]) -> list[Any]:
        ids = np.full(8, prompt, np.uint32)
        return [make_row(n, prompt=str(prompt), sample=i, prompt_ids=ids) for i, n in enumerate(tokens)]

    rows = [
        row for rows in zip(group(1, [4, 4, 4]), group(2, [4, 2, 1]), group(3, [2, 2, 2]), strict=True) for row in rows
    ]
    assert split_groups(rows, 23) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert split_groups(rows, 46) == [[0, 3, 6, 1, 4, 7], [2, 5, 8]]
    assert split_groups(rows, 18) == [[0, 3], [6], [1, 4], [7], [2, 5, 8]]
    assert spared(rows, [[0, 3, 6], [1, 4], [7], [2, 5, 8]]) == 8 * (2 + 1 + 2)
    assert sorted(i for part in split_groups(rows, 1) for i in part) == list(range(9))
