"""Critics of turns without a run: their steps, and what two ranks and a checkpoint must keep of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from saved_state import save_state
from thread_ranks import Meeting

from student.data.row import Row
from student.model.ranks import Ranks
from student.rl.fitted import TurnCritic
from student.state.state_io import load_state

C = TypeVar("C", bound=TurnCritic)


def step_of(made: TurnCritic, step: int, mine: list[Row]) -> dict[str, float]:
    """A step of a run in which no update is asked for; gives the metrics."""
    made.compose(mine)
    services: Any = made.services
    assert list(made.updates([], services)) == []
    return made.after_update(step, services)


def assert_two_ranks_fit_as_one_and_a_checkpoint_keeps_it(
    make: Callable[[Ranks | None], C], rows: Callable[[int], list[Row]], folder: Path
) -> tuple[C, C]:
    """Heads are equal to the bit; gives a critic, and another, resumed from its checkpoint, a step later.

    Args:
        make: a critic on these ranks; alone on None.
        rows: of a step, on all ranks.
        folder: where the checkpoint goes.
    """
    alone, meeting = make(None), Meeting(2)
    pair = [make(meeting.rank(index)) for index in range(2)]

    def work(index: int) -> None:
        for step in range(3):
            step_of(pair[index], step, rows(step)[index::2])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for step in range(3):
        step_of(alone, step, rows(step))
    for one in pair:
        _assert_heads_equal(one, alone)
    save_state(folder, "critic", alone.state_dict())
    again = make(None)
    again.load_state_dict(load_state(folder, "critic"))
    for one in (alone, again):
        step_of(one, 3, rows(3))
    _assert_heads_equal(again, alone)
    return alone, again


def _assert_heads_equal(one: Any, other: Any) -> None:
    assert one.heads is not None
    np.testing.assert_array_equal(one.heads, other.heads)
