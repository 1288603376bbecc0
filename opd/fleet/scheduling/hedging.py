"""Which straggling row is worth a second attempt elsewhere. Pure: no I/O, the clock is an argument.

Two reasons, both bounded by the hedge budget (5 % of the rows):

* overdue: the call is older than the 0.95 quantile of recent latency-to-expectation ratios allows;
* tail: nothing waits any more, and an idle replica would be done clearly sooner than the one that has the row.
"""

from collections import deque
from typing import NamedTuple

from opd.fleet.scheduling.budget import HedgeBudget
from opd.fleet.scheduling.completion_estimate import Outlook
from opd.fleet.scheduling.in_flight import Call, Job, Lane
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import HedgeSettings

_WINDOW = 256
_FIRST_RATIO = 3.0
_ENOUGH = 20
_TAIL_GAIN = 0.25
_STALL_GAIN = 0.5
_MOST_MOVES = 3


class RatioQuantile:
    """A running quantile of latency divided by expected latency; 3 until twenty calls were seen, never below 1.5."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._cached = _FIRST_RATIO
        self._fresh = 0

    def add(self, ratio: float) -> None:
        """One finished call."""
        self._ratios.append(ratio)
        self._fresh += 1
        if len(self._ratios) >= _ENOUGH and self._fresh >= 8:
            self._fresh = 0
            ordered = sorted(self._ratios)
            self._cached = max(1.5, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])

    def value(self) -> float:
        """The ratio beyond which a call is overdue."""
        return self._cached


class Hedger:
    """Chooses hedges.

    Attributes:
        budget: how many rows were sent and hedged.
        overdue: the adaptive ratio.
    """

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self.budget = HedgeBudget(settings.cap if settings.enabled else 0.0)
        self.overdue = RatioQuantile(settings.quantile)

    def finished(self, call: Call, now: float) -> None:
        """A first-attempt call was answered completely."""
        if not call.hedge and call.expected > 0:
            self.overdue.add((now - call.started) / call.expected)

    def choose(self, scheduler: Scheduler, now: float) -> tuple[list[Call], list[Call]]:
        """Start the hedges that are worth it now, the largest expected gain first.

        Returns:
            The started hedges, and the calls to take back: overdue ones on a server that has stalled, once the
            budget is spent. Their rows move instead of being doubled, each at most three times.
        """
        started: list[Call] = []
        stalled: dict[int, Call] = {}
        if not self._settings.enabled:
            return started, []
        for teacher, calls in self._suspects(scheduler, now).items():
            look = scheduler.look(teacher).at(now)
            ready = [lane for lane in look.lanes.values() if lane.open(now)]
            if not ready:
                continue
            stragglers = [found for call, late in calls for found in _stragglers(look, ready, call, late, now)]
            for straggler in sorted(stragglers, key=_by_gain):
                call, job = straggler.call, straggler.job
                finish, target = _best(ready, look, call, job, now)
                if target is None or straggler.remaining - finish < self._settings.min_seconds:
                    continue
                if self.budget.take():
                    started.append(scheduler.start(target, [job], look.speed(target), now, hedge=True))
                elif straggler.late and straggler.gain > _STALL_GAIN * straggler.remaining and job.moves < _MOST_MOVES:
                    stalled[call.number] = call
        return started, list(stalled.values())

    def _suspects(self, scheduler: Scheduler, now: float) -> dict[str, list[tuple[Call, bool]]]:
        """By teacher, the calls that are overdue (True) or that hold up the end (False)."""
        found: dict[str, list[tuple[Call, bool]]] = {}
        overdue = self.overdue.value()
        for lane in scheduler.lanes.values():
            for call in lane.calls.values():
                if call.hedge or not call.waiting:
                    continue
                late = now - call.started > overdue * call.expected
                if late or not len(scheduler.queues[call.teacher]):
                    found.setdefault(call.teacher, []).append((call, late))
        return found


class _Straggler(NamedTuple):
    """A row worth a second attempt: seconds gained, seconds it would still take where it is, whether overdue."""

    gain: float
    remaining: float
    late: bool
    call: Call
    job: Job


def _by_gain(straggler: _Straggler) -> tuple[float, int]:
    return -straggler.gain, -straggler.job.number


def _stragglers(look: Outlook, ready: list[Lane], call: Call, late: bool, now: float) -> list[_Straggler]:
    """The rows of a suspect call that another lane would finish clearly sooner."""
    found: list[_Straggler] = []
    remaining = _remaining(call, now)
    for job in reversed(call.jobs):
        if job.number not in call.waiting or job.hedged or job.done:
            continue
        finish, target = _best(ready, look, call, job, now)
        gain = remaining - finish
        if target is not None and gain > (0.0 if late else _TAIL_GAIN * remaining):
            found.append(_Straggler(gain, remaining, late, call, job))
    return found


def _remaining(call: Call, now: float) -> float:
    """Seconds until the lane has worked off this call and what is before it, at its present speed.

    A lane that has been silent for long is expected to be so for as long again, whatever its speed was before.
    """
    lane = call.lane
    speed = lane.meter.speed(now)
    if not speed:
        return max(now - call.started, call.expected)
    later = sum(other.waiting_tokens for other in lane.calls.values() if other.number > call.number)
    return max((lane.ahead(now, speed) - later) / speed, lane.meter.since_answer(now))


def _best(ready: list[Lane], look: Outlook, call: Call, job: Job, now: float) -> tuple[float, Lane | None]:
    """The lane, other than the call's, that would finish the row first, and in how many seconds."""
    best: tuple[float, Lane | None] = (float("inf"), None)
    for lane in ready:
        if lane is call.lane or lane.key in job.avoid or not lane.open(now):
            continue
        finish = look.finish(lane, job.tokens)
        if finish < best[0]:
            best = (finish, lane)
    return best
