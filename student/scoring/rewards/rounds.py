"""Rewards of rows that arrive in rounds: a reward sees every group whole, even if its rows came in different rounds.

If a round adds to a group and a reward compares the answers of a group, all rows so far are rewarded again, as if they
had arrived at once. What rewards had set on the rows and counted in metrics is undone first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices
    from student.scoring.rewards.chain import RewardChain


class StepRewards:
    """Rewards the rows of a step, round after round.

    Args:
        chain: the rewards of the recipe.
        services: what the rewards may ask of the loop.

    Attributes:
        rows: all rows rewarded so far.
        reads_signals: whether any reward reads the scores of models.
    """

    def __init__(self, chain: RewardChain, services: RewardServices) -> None:
        self._chain, self._services = chain, services
        self.reads_signals = chain.reads_signals
        self._fired = chain.counted()
        self._given: list[_Given] = []
        self._groups: dict[str, list[Row]] = {}
        self.rows: list[Row] = []

    def __call__(self, rows: Sequence[Row]) -> None:
        """Reward `rows`, and all rows before them again if a group has grown."""
        again: list[Row] = []
        if self._chain.by_group and any(row.key.group in self._groups for row in rows):
            # All rows, not only the grown groups: what a reward has counted cannot be undone row by row.
            again = list(self.rows)
            for given in self._given:
                given.restore()
            self._chain.recount(self._fired)
        self._given += [_Given.of(row) for row in rows]
        for row in rows:
            self._groups.setdefault(row.key.group, []).append(row)
        self.rows += rows
        self._chain.apply([*again, *rows], self._services)

    def group(self, row: Row) -> list[Row]:
        """All rewarded rows of the group of `row`."""
        return self._groups[row.key.group]


@dataclass(frozen=True, slots=True)
class _Given:
    """The state of a row before it was rewarded."""

    row: Row
    values: dict[str, Any]

    @classmethod
    def of(cls, row: Row) -> _Given:
        plain = ("reward", "rewarded", "token_rewards", "turn_rewards", "trained", "weight")
        values = {name: getattr(row, name) for name in plain}
        return cls(row, values | {"reward_parts": dict(row.reward_parts), "notes": dict(row.notes)})

    def restore(self) -> None:
        for name, value in self.values.items():
            setattr(self.row, name, dict(value) if isinstance(value, dict) else value)
