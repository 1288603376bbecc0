"""Groups of rows that answer the same prompt, and the reward of a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from student.data.row import Row


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one group key whose rewards are known.

    Attributes:
        rows: the rows, in the order of the step.
        rewards: their rewards.
    """

    rows: tuple[Row, ...]
    rewards: tuple[float, ...]

    @property
    def degenerate(self) -> bool:
        """Whether all rewards are equal, so that the group prefers nothing."""
        return len(set(self.rewards)) <= 1


def reward_of(row: Row) -> float | None:
    """The verdict's value plus all named parts of the reward; None while the verdict is missing or unknown."""
    if row.verdict is None or not row.verdict.known:
        return None
    return row.verdict.value + sum(row.reward_parts.values())


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """Rows by group key, without those whose reward is unknown: an unknown reward is not a reward of 0."""
    groups: dict[str, list[tuple[Row, float]]] = {}
    for row in rows:
        reward = reward_of(row)
        if reward is not None:
            groups.setdefault(row.key.group, []).append((row, reward))
    return [Group(tuple(r for r, _ in pairs), tuple(v for _, v in pairs)) for pairs in groups.values()]
