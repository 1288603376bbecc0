"""The student's entropy at the tokens of a row, for strategies that branch where it is high."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opd.errors import ConfigError
from opd.wire.types import PayloadKind
from student.data.needs import STUDENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from student.data.row import Row


def entropies(row: Row, width: int, strategy: str, tokens: slice = slice(None)) -> NDArray[np.float64]:
    """[T] the entropy H of each token over the `width` most likely ids, nats, or of those in `tokens` alone.

    Args:
        row: a row that the student has scored with payload gather.
        width: number of ids.
        strategy: its name, for the message.
        tokens: positions of the response.

    Raises:
        ConfigError: if the row has no log-probs of the student.
    """
    scores = row.signals.get((STUDENT, PayloadKind.GATHER))
    if scores is None or scores.values is None:
        raise ConfigError(
            f"rollout.strategy {strategy} reads the student's log-probs, which this run does not collect."
        )
    values = np.asarray(scores.values[tokens, :width], np.float64)
    return np.asarray(-(np.exp(values) * values).sum(-1))
