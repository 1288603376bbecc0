"""The error of a rollout engine that went away, with what it had finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.errors import RolloutEngineError

if TYPE_CHECKING:
    from student.data.row import Row


class EngineLostError(RolloutEngineError):
    """The engine went away while it sampled. Synced again, it can sample what is left.

    Attributes:
        rows: those that had finished and were told of, None for the others, in the order of what was planned.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rows: list[Row | None] = []
