"""The error for a rollout engine that was lost, with the rows that it had finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.errors import RolloutEngineError

if TYPE_CHECKING:
    from student.data.row import Row


class EngineLostError(RolloutEngineError):
    """The engine was lost while it sampled. After another sync it can sample the rows that are left.

    Attributes:
        rows: the finished rows that were passed to `on_row`, and None for the others, in the order of the plan.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rows: list[Row | None] = []
