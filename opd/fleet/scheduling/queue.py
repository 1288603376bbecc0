"""The rows that wait for one teacher: sorted by length, and accessible by group and by age."""

import bisect
from collections import deque
from collections.abc import Callable, Iterator

from opd.fleet.scheduling.in_flight import ScoreTask

_SCAN = 128


class TeacherQueue:
    """The waiting rows of one teacher.

    Attributes:
        tokens: tokens of all waiting rows.
        served: tokens handed out so far: the teacher's virtual time, for fairness.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.served = 0.0
        self._sorted: list[tuple[int, int, ScoreTask]] = []
        self._groups: dict[str, dict[int, ScoreTask]] = {}
        # Rows that leave the queue stay in it, because removing from the middle is slow; `_present` tells which remain.
        self._arrival: deque[ScoreTask] = deque()
        self._present: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[ScoreTask]:
        return iter([task for _, _, task in self._sorted])

    def __contains__(self, task: ScoreTask) -> bool:
        return task.number in self._present

    def add(self, task: ScoreTask, *, urgent: bool = False) -> None:
        """Queue a row; an urgent one (a re-issue) counts as the oldest."""
        bisect.insort(self._sorted, (-task.tokens, task.number, task), key=_order)
        self._present.add(task.number)
        self.tokens += task.tokens
        if task.group:
            self._groups.setdefault(task.group, {})[task.number] = task
        if urgent:
            self._arrival.appendleft(task)
        else:
            self._arrival.append(task)

    def remove(self, task: ScoreTask) -> None:
        """Remove a row from the queue."""
        # Numbers are unique, so this finds the row itself and not another one of the same length.
        index = bisect.bisect_left(self._sorted, (-task.tokens, task.number), key=_order)
        del self._sorted[index]
        self._present.discard(task.number)
        self.tokens -= task.tokens
        if not self._sorted:
            self._arrival.clear()  # it may hold rows that left before an older one did
        members = self._groups.get(task.group)
        if members is not None:
            members.pop(task.number, None)
            if not members:
                del self._groups[task.group]

    def oldest(self) -> ScoreTask | None:
        """The row that has waited longest; re-issues come first."""
        while self._arrival and self._arrival[0].number not in self._present:
            self._arrival.popleft()
        return self._arrival[0] if self._arrival else None

    def shortest(self) -> ScoreTask | None:
        """The shortest row, or None."""
        return self._sorted[-1][2] if self._sorted else None

    def longest(self, most_tokens: float, accept: Callable[[ScoreTask], bool]) -> ScoreTask | None:
        """The longest acceptable row of at most `most_tokens` tokens, among the first 128 that are short enough.

        The limit keeps a choice cheap if thousands of rows are barred from a server.
        """
        # Sorted by negative length, so all rows from here on are short enough.
        start = bisect.bisect_left(self._sorted, -most_tokens, key=_length)
        for _, _, task in self._sorted[start : start + _SCAN]:
            if accept(task):
                return task
        return None

    def group(self, name: str) -> list[ScoreTask]:
        """The waiting rows of a group, in order of submission; none for the group ""."""
        return list(self._groups.get(name, {}).values()) if name else []


def _order(entry: tuple[int, int, ScoreTask] | tuple[int, int]) -> tuple[int, int]:
    return entry[0], entry[1]


def _length(entry: tuple[int, int, ScoreTask]) -> int:
    return entry[0]
