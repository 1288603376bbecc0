"""What a judge of turns reads of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from student.data.row import Row


def with_answer(row: Row, turn: int) -> NDArray[np.uint32]:
    """The ids that the student read before a turn, the turn, and the environment's answer.

    If a summary was written in between, the answer follows the summary.
    """
    turns = row.turns or ((0, row.length),)
    start, end = turns[turn]
    last = turn + 1 if turn + 1 in row.summaries else turn
    after = turns[last + 1][0] if last + 1 < len(turns) else row.length
    answer = row.response_ids[turns[last][1] : after]
    return np.concatenate([row.read_before(start), row.response_ids[start:end], answer])
