"""Answers under way: what models were asked about rows, waited for row by row."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from opd.fleet.membership.outage import OutageHooks, OutageWatch
from opd.fleet.source import ScoreSource
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from student.data.row import Row, SignalKey
from student.recipe import TeacherSettings
from student.scoring.needs import SignalNeed
from student.scoring.targets import Target

_POLL_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Call:
    """What is asked of one model about a row, under the context of `reads`; the row keeps the answer under `key`.

    The response of `item` begins at position `first` of the row's: a row of several windows is asked about in as many
    calls. `future` holds the answer of a call to the fleet once it was sent, `here` that of a model in process.
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
        """The answer, which has been waited for."""
        if self.here is not None:
            return self.here
        assert self.future is not None, "the call was neither sent nor read here"
        return self.future.result()

    @property
    def there(self) -> bool:
        """Whether the answer need not be waited for."""
        return self.future is None or self.future.done()

    def reads_here(self, model: str) -> bool:
        """Whether `model` answers it in this process."""
        return self.target.local and self.target.model == model


class Arriving:
    """Answers about rows, which get them when they are waited for.

    Args:
        rows: the rows, with what was asked about each and sent.
        keep: puts the answers to a row's calls into `row.signals`.
        fleet: answers; None where this process answers all.
        settings: the recipe's `teachers` group.
        hooks: what to call, in the waiting thread, while a teacher is away.

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
        for row, calls in rows:  # a row that is given twice was asked about once
            self._left.setdefault(id(row), []).extend(calls)
        self._rows = [row for row, _ in rows]  # kept, so that no other row gets the id of one
        self._keep, self._fleet = keep, fleet
        self._watch = None if fleet is None or settings is None else OutageWatch(settings.fleet.outage, hooks)
        self.waited = 0.0

    def late(self, rows: Sequence[Row]) -> int:
        """How many of `rows` have answers that are not there yet."""
        return sum(not all(call.there for call in self._left.get(id(row), [])) for row in rows)

    def wait_all(self, poll: Callable[[], None] = lambda: None) -> None:
        """`wait` for all rows."""
        self.wait(self._rows, poll)

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not any(self._left.values())

    def wait(self, rows: Sequence[Row], poll: Callable[[], None] = lambda: None) -> None:
        """Until all answers about `rows` are there; they are then in the rows.

        Args:
            rows: some of the rows, those that were waited for before keep what they have; for others, such as copies
                that a method made, all are waited for.
            poll: called about twice a second; may raise to give up.

        Raises:
            OpdError: what a call failed with.
        """
        begin = time.monotonic()
        if any(id(row) not in self._left for row in rows):
            rows = self._rows  # copies share the signals of rows that were asked about
        calls = {id(row): self._left[id(row)] for row in rows}
        futures = {call.future for mine in calls.values() for call in mine if call.future is not None}
        while futures:
            done, futures = wait(futures, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises at once what a failed call holds, without waiting for the rest
            if futures:
                poll()
                if self._watch is not None and self._fleet is not None:
                    self._watch.see(self._fleet.outages())
        for row in rows:
            self._keep(row, calls[id(row)])
        self._left |= {key: [] for key in calls}
        if self._watch is not None and self.done:  # before, a teacher may still be away for the rows that are left
            self._watch.see([])
        self.waited += time.monotonic() - begin

    def close(self) -> None:
        """Give up what nothing has waited for, which should not load the fleet any more."""
        for call in (call for calls in self._left.values() for call in calls):
            if call.future is not None:
                call.future.cancel()
        self._left = {key: [] for key in self._left}
