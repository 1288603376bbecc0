"""Outages: how long a teacher has been without a usable replica, and what is due because of it. No I/O.

The fleet keeps the clock; the caller acts, in its own thread, because only the caller can save a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass

from opd.fleet.settings import OutageSettings


@dataclass(frozen=True, slots=True)
class Outage:
    """A teacher that cannot serve at present.

    Attributes:
        teacher: its name.
        seconds: how long it has been unavailable.
        rows: number of rows that wait for it.
        reason: why its replicas are not usable.
        budget_seconds: seconds after which the rows fail.
    """

    teacher: str
    seconds: float
    rows: int
    reason: str
    budget_seconds: float

    def sentence(self) -> str:
        """The message that a trainer prints while it waits."""
        return (
            f"waiting for teacher {self.teacher!r} for {self.seconds:.0f} s with {self.rows} rows "
            f"(at most {self.budget_seconds:.0f} s): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class OutageHooks:
    """Callbacks for outages, called in the thread that waits for scores.

    Attributes:
        waiting: called every `notice_seconds` of an outage.
        emergency: called once per outage, after `emergency_after_seconds`: the moment to save a checkpoint.
        recovered: called when the teacher can serve again.
    """

    waiting: Callable[[Outage], None] | None = None
    emergency: Callable[[Outage], None] | None = None
    recovered: Callable[[Outage], None] | None = None


class OutageWatch:
    """Turns the outages observed over time into calls of the hooks, each when it is due and not more often."""

    def __init__(self, settings: OutageSettings, hooks: OutageHooks) -> None:
        self._settings = settings
        self._hooks = hooks
        self._last: dict[str, Outage] = {}
        self._noticed: dict[str, float] = {}
        self._saved: set[str] = set()

    def see(self, outages: list[Outage]) -> None:
        """Call the hooks that are due, given all current outages with waiting rows."""
        present = {outage.teacher: outage for outage in outages}
        for name in [name for name in self._last if name not in present]:
            outage = self._last.pop(name)
            self._noticed.pop(name, None)
            self._saved.discard(name)
            if self._hooks.recovered is not None:
                self._hooks.recovered(outage)
        for name, outage in present.items():
            # A replica that fails one ping is back within a second, which deserves neither a notice nor a "recovered".
            if outage.seconds < min(1.0, self._settings.notice_seconds):
                continue
            self._last[name] = outage
            noticed = self._noticed.get(name)
            if noticed is None or outage.seconds - noticed >= self._settings.notice_seconds:
                self._noticed[name] = outage.seconds
                if self._hooks.waiting is not None:
                    self._hooks.waiting(outage)
            if outage.seconds >= self._settings.emergency_after_seconds and name not in self._saved:
                self._saved.add(name)
                if self._hooks.emergency is not None:
                    self._hooks.emergency(outage)
