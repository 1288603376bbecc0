"""What the scheduler knows of one server: which teachers it may ask for, how much is in flight, how fast it is."""

import math
from collections import OrderedDict

from opd.fleet.job import Call

_MEMORY_SECONDS = 20.0
_RECENT_GROUPS = 32
FIRST_SPEED = 1000.0
"""Tokens per second that a fleet is believed to do before anything was measured."""


class SpeedMeter:
    """Tokens per second while busy, over about the last twenty busy seconds; a stall lowers it while it lasts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._mark: float | None = None

    def busy(self, now: float) -> None:
        """Work is in flight from now on; without effect when it was already."""
        if self._mark is None:
            self._mark = now

    def idle(self) -> None:
        """Nothing is in flight any more."""
        self._mark = None

    def answered(self, tokens: int, now: float) -> None:
        """`tokens` were answered now."""
        elapsed = 0.0 if self._mark is None else max(0.0, now - self._mark)
        keep = math.exp(-elapsed / _MEMORY_SECONDS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + elapsed
        self._mark = now

    def since_answer(self, now: float) -> float:
        """Busy seconds since the last answer, or since work arrived."""
        return 0.0 if self._mark is None else max(0.0, now - self._mark)

    def forget(self) -> None:
        """Start over: another process, other hardware."""
        self._tokens = self._seconds = 0.0

    def speed(self, now: float) -> float | None:
        """Tokens per second, or None before anything was measured."""
        if self._tokens <= 0.0:
            return None
        return self._tokens / max(self._seconds + self.since_answer(now), 1e-6)


class Lane:
    """One server as the scheduler sees it.

    Attributes:
        key: its address.
        teachers: names that may be asked for here now: its usable replicas.
        calls: calls in flight by number.
        in_flight_tokens, in_flight_rows: what has been sent and not answered.
        window: tokens that may be in flight beyond the first two rows.
        last_sent: when a call last went out.
        paused_until: time before which nothing new is sent, from the server's pushback.
    """

    def __init__(self, key: str, limit_tokens: int) -> None:
        self.key = key
        self.teachers: set[str] = set()
        self.calls: dict[int, Call] = {}
        self.in_flight_tokens = 0
        self.in_flight_rows = 0
        self.window = 0.0
        self.last_sent = float("-inf")
        self.paused_until = 0.0
        self.meter = SpeedMeter()
        self.answered_tokens = 0
        self._limit = limit_tokens
        self._first_rows = 2
        self._groups: OrderedDict[tuple[str, str], None] = OrderedDict()

    def open(self, now: float) -> bool:
        """Whether another row may be sent now."""
        if now < self.paused_until:
            return False
        return self.in_flight_rows < self._first_rows or self.in_flight_tokens < self.window

    def room(self) -> float:
        """Tokens left in the window."""
        return max(0.0, self.window - self.in_flight_tokens)

    def ahead(self, now: float, speed: float) -> float:
        """Tokens still to be worked off: what is in flight, less what `speed` has done of the row under way.

        At most the oldest waiting row is taken as under way, so a stalled server is not believed to progress.
        """
        if not self.calls:
            return 0.0
        oldest = next(
            (job.tokens for call in self.calls.values() for job in call.jobs if job.number in call.waiting), 0
        )
        return self.in_flight_tokens - min(speed * self.meter.since_answer(now), float(oldest))

    def sent(self, call: Call, now: float) -> None:
        """Account for a call that starts now."""
        self.calls[call.number] = call
        self.last_sent = now
        self.in_flight_rows += len(call.jobs)
        self.in_flight_tokens += sum(job.tokens for job in call.jobs)
        self.meter.busy(now)
        for job in call.jobs:
            if job.group:
                self._groups[(job.teacher, job.group)] = None
                self._groups.move_to_end((job.teacher, job.group))
        while len(self._groups) > _RECENT_GROUPS:
            self._groups.popitem(last=False)

    def answered(self, tokens: int, now: float) -> None:
        """A row of `tokens` was answered: free its place, measure, and open the window by twice as much."""
        self.meter.answered(tokens, now)
        self.answered_tokens += tokens
        self.window = min(float(self._limit), self.window + 2 * tokens)
        self._first_rows = 2
        self._free(tokens)

    def released(self, tokens: int, now: float) -> None:
        """A row of `tokens` left without an answer; the time it took counts."""
        self.meter.answered(0, now)
        self._free(tokens)

    def _free(self, tokens: int) -> None:
        self.in_flight_rows -= 1
        self.in_flight_tokens -= tokens
        if self.in_flight_rows == 0:
            self.meter.idle()

    def pushed_back(self, until: float) -> None:
        """The server is overloaded: nothing new before `until`, and half as much from then on."""
        self.paused_until = max(self.paused_until, until)
        self.window /= 2
        self._first_rows = 1

    def reset(self) -> None:
        """Start slowly again, after a failure or a restart."""
        self.window = 0.0
        self._first_rows = 2
        self.meter.forget()

    def recent_groups(self, teacher: str) -> list[str]:
        """Groups of `teacher` that were sent here lately, latest first."""
        return [group for name, group in reversed(self._groups) if name == teacher]
