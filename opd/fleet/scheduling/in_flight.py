"""What is under way: rows (`Job`), the calls that carry them, and the lane, what the scheduler knows of one server.

They know each other, so they live together: a row lists its calls, a call its rows and its lane, a lane its calls.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from opd.fleet.scheduling.throughput import SpeedMeter

_RECENT_GROUPS = 32
_ACCEPTED_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class Job:
    """One row to score, exactly once.

    Attributes:
        number: order of submission, unique in the fleet.
        teacher: name of the teacher.
        tokens: prompt and response tokens, the cost of the row.
        batch_key: rows with equal keys (payload, temperature) may travel in one call.
        group: rows of one prompt share a group, which keeps them together; "" for none.
        submitted: seconds of the fleet's clock.
        deadline: seconds of the fleet's clock, inf for none.
        cargo: what the owner of the scheduler needs to send the row and to deliver its result.
        failures: attempts that failed.
        avoid: servers where an attempt failed; others are preferred.
        calls: calls that carry the row now: one, or two when it is hedged.
        hedged: whether a second call was started.
        moves: how often it was taken back from a server that stalled.
        done: whether a result, an error or a cancellation was delivered.
    """

    number: int
    teacher: str
    tokens: int
    batch_key: Hashable = None
    group: str = ""
    submitted: float = 0.0
    deadline: float = float("inf")
    cargo: Any = None
    failures: int = 0
    avoid: set[str] = field(default_factory=set)
    calls: list["Call"] = field(default_factory=list)
    hedged: bool = False
    moves: int = 0
    done: bool = False


@dataclass(eq=False, slots=True)
class Call:
    """One RPC: rows of one teacher with one payload on one server.

    Attributes:
        number: order of dispatch.
        lane: the server.
        teacher: name of the teacher.
        jobs: the rows in the order of the request.
        waiting: numbers of the rows that have not been answered.
        started: seconds of the fleet's clock.
        expected: seconds after which it should be done, from the server's measured speed and what is before it.
        hedge: whether it is a second attempt.
    """

    number: int
    lane: "Lane"
    teacher: str
    jobs: list[Job]
    waiting: set[int]
    started: float
    expected: float
    hedge: bool = False

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that have not been answered."""
        return sum(job.tokens for job in self.jobs if job.number in self.waiting)


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
        refused_since: time of the first pushback after the last answer, inf when there was none.
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
        self.refused_since = float("inf")
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
        self.refused_since = float("inf")
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

    def pushed_back(self, now: float, until: float) -> None:
        """The server is overloaded: nothing new before `until`, and half as much from then on."""
        self.paused_until = max(self.paused_until, until)
        self.refused_since = min(self.refused_since, now)
        self.window /= 2
        self._first_rows = 1

    def refuses(self, now: float) -> bool:
        """Whether the server has done nothing but refuse calls lately.

        Not while it works on a call that it took before, and not two seconds after its pause: a call that it has not
        refused by then was taken.
        """
        if now >= self.paused_until + _ACCEPTED_SECONDS or self.refused_since == float("inf"):
            return False
        return all(call.started >= self.refused_since for call in self.calls.values())

    def reset(self) -> None:
        """Start slowly again, after a failure or a restart."""
        self.window = 0.0
        self._first_rows = 2
        self.meter.forget()

    def recent_groups(self, teacher: str) -> list[str]:
        """Groups of `teacher` that were sent here lately, latest first."""
        return [group for name, group in reversed(self._groups) if name == teacher]
