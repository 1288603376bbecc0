"""Requests to models about rows, and waiting for their answers row by row."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from opd.fleet.membership.outage import OutageHooks, OutageWatch
from opd.fleet.source import ScoreSource
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from student.data.needs import SignalNeed
from student.data.row import Row, SignalKey
from student.scoring.targets import Target
from student.settings.teachers import TeacherSettings

_POLL_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Call:
    """One request to a model about a row.

    The model reads the row under the context named `reads`, and the row keeps the answer under `key`. The response of
    `item` starts at position `first` of the row's response; a row of several windows needs one call per window.
    `future` holds the answer of a call to the fleet once it was sent, `here` the answer of a model in this process.
    """

    key: SignalKey
    target: Target
    need: SignalNeed
    reads: str
    spec: PayloadSpec
    item: ScoreItem
    first: int
    row: Row
    future: Future[Scores] | None = None
    here: Scores | None = None

    @property
    def answer(self) -> Scores:
        """The answer; blocks if it has not arrived."""
        if self.here is not None:
            return self.here
        assert self.future is not None, "the call was neither sent nor read here"
        return self.future.result()

    @property
    def there(self) -> bool:
        """Whether the answer has arrived, or comes from this process."""
        return self.future is None or self.future.done()

    def reads_here(self, model: str) -> bool:
        """Whether `model` answers it in this process."""
        return self.target.local and self.target.model == model


class Arriving:
    """The outstanding answers about rows; `wait` puts them into the rows.

    Args:
        rows: the rows, each with its calls.
        keep: puts the answers to a row's calls into `row.signals`.
        fleet: the client that the calls were sent to; None if this process answers all of them.
        settings: the recipe's `teachers` group.
        hooks: called in the waiting thread during an outage of a teacher.

    Attributes:
        waited: seconds spent in `wait`.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Row, list[Call]]],
        keep: Callable[[Row, list[Call]], None],
        fleet: ScoreSource | None,
        settings: TeacherSettings | None,
        hooks: OutageHooks,
    ) -> None:
        self._left: dict[int, list[Call]] = {}
        for row, calls in rows:  # a row that occurs twice has calls only once
            self._left.setdefault(id(row), []).extend(calls)
        self._rows = [row for row, _ in rows]  # kept alive, so that no other row gets the same id()
        self._keep, self._fleet = keep, fleet
        self._watch = None if fleet is None or settings is None else OutageWatch(settings.fleet.outage, hooks)
        self.waited = 0.0

    def late(self, rows: Sequence[Row]) -> int:
        """How many of `rows` still lack an answer."""
        return sum(not all(call.there for call in self._left.get(id(row), [])) for row in rows)

    def wait_all(self, poll: Callable[[], None] = lambda: None) -> None:
        """`wait` for all rows."""
        self.wait(self._rows, poll)

    @property
    def done(self) -> bool:
        """Whether all rows have been waited for."""
        return not any(self._left.values())

    def wait(self, rows: Sequence[Row], poll: Callable[[], None] = lambda: None) -> None:
        """Wait for all answers about `rows`, and put them into the rows.

        Args:
            rows: some of the rows; rows that were waited for before keep their answers. If one is not among them, such
                as a copy that a method made, all rows are waited for.
            poll: called about twice a second; may raise to give up.

        Raises:
            OpdError: if a call failed.
        """
        begin = time.monotonic()
        if any(id(row) not in self._left for row in rows):
            rows = self._rows  # copies share the signals of the original rows
        calls = {id(row): self._left[id(row)] for row in rows}
        futures = {call.future for mine in calls.values() for call in mine if call.future is not None}
        while futures:
            done, futures = wait(futures, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises the error of a failed call at once, without waiting for the rest
            if futures:
                poll()
                if self._watch is not None and self._fleet is not None:
                    self._watch.see(self._fleet.outages())
        for row in rows:
            self._keep(row, calls[id(row)])
        self._left |= {key: [] for key in calls}
        if self._watch is not None and self.done:  # until then, the remaining rows may still wait for a lost teacher
            self._watch.see([])
        self.waited += time.monotonic() - begin

    def close(self) -> None:
        """Cancel all calls that nothing has waited for, so that they do not load the fleet."""
        for call in (call for calls in self._left.values() for call in calls):
            if call.future is not None:
                call.future.cancel()
        self._left = {key: [] for key in self._left}
