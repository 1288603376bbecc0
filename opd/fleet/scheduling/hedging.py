"""Which straggling rows deserve a second attempt elsewhere. No I/O; the clock is an argument.

There are two reasons, both limited by the hedge budget (5 % of the rows by default):

* overdue: the RPC is older than its expected latency times the 0.95 quantile of recent ratios of actual to expected
  latency;
* tail: no rows wait any more, and an idle replica would finish clearly sooner than the one that has the row.
"""

from collections import deque
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from opd.fleet.scheduling.budget import HedgeBudget
from opd.fleet.scheduling.completion_estimate import CompletionEstimate
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask, ServerLoad
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import HedgeSettings

_WINDOW = 256
_FIRST_RATIO = 3.0
_ENOUGH = 20
_TAIL_GAIN = 0.25  # share of the remaining time that a hedge at the end of a step must save, as speeds are estimates
_STALL_GAIN = 0.5  # the same for moving a row instead of doubling it: what its server has done of it is lost
_MOST_MOVES = 3


class RatioQuantile:
    """Running quantile of latency over expected latency; 3 until twenty RPCs have finished, and never below 1.5."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._cached = _FIRST_RATIO
        self._fresh = 0

    def add(self, ratio: float) -> None:
        """Add the ratio of a finished RPC."""
        self._ratios.append(ratio)
        self._fresh += 1
        if len(self._ratios) >= _ENOUGH and self._fresh >= 8:  # not each time: one ratio hardly moves a quantile
            self._fresh = 0
            ordered = sorted(self._ratios)
            self._cached = max(1.5, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])

    def value(self) -> float:
        """The ratio above which an RPC is overdue."""
        return self._cached


class Hedger:
    """Chooses hedges.

    Attributes:
        budget: how many rows were sent and how many hedged.
        overdue: the adaptive ratio beyond which an RPC is overdue.
    """

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self.budget = HedgeBudget(settings.cap if settings.enabled else 0.0)
        self.overdue = RatioQuantile(settings.quantile)

    def finished(self, rpc: Rpc, now: float) -> None:
        """Note that an RPC was answered completely; hedges are ignored."""
        if not rpc.hedge and rpc.expected > 0:
            self.overdue.add((now - rpc.started) / rpc.expected)

    def long_overdue(self, rpc: Rpc, now: float, seconds: float) -> bool:
        """Whether an RPC is more than twice as old as an overdue one, and older than `seconds`."""
        return now - rpc.started > max(seconds, 2 * self.overdue.value() * rpc.expected)

    def choose(self, scheduler: Scheduler, now: float) -> tuple[list[Rpc], list[Rpc]]:
        """Start the hedges that are worth it now, beginning with the largest expected gain.

        Returns:
            The hedges that were started, and the RPCs to take back: those that are overdue on a server that has
            stalled, once the budget is spent. Their rows are moved instead of doubled, each at most three times.
        """
        started: list[Rpc] = []
        stalled: dict[int, Rpc] = {}
        if not self._settings.enabled:
            return started, []
        for teacher, rpcs in self._suspects(scheduler, now).items():
            estimate = scheduler.estimate(teacher).at(now)
            ready = _Ready(estimate, now)
            if not ready.servers:
                continue
            stragglers = [found for rpc, late in rpcs for found in _stragglers(ready, rpc, late, now)]
            for straggler in sorted(stragglers, key=_by_gain):
                rpc, task = straggler.rpc, straggler.task
                finish, target = ready.best(rpc, task)  # again, because earlier hedges may have taken the server
                if target is None or straggler.remaining - finish < self._settings.min_seconds:
                    continue
                if self.budget.take():
                    started.append(scheduler.start(target, [task], estimate.speed(target), now, hedge=True))
                    ready.took_a_row(target)
                elif straggler.late and straggler.gain > _STALL_GAIN * straggler.remaining and task.moves < _MOST_MOVES:
                    stalled[rpc.number] = rpc
        return started, list(stalled.values())

    def _suspects(self, scheduler: Scheduler, now: float) -> dict[str, list[tuple[Rpc, bool]]]:
        """By teacher, the RPCs that are overdue (True) or that may hold up the end of the step (False)."""
        found: dict[str, list[tuple[Rpc, bool]]] = {}
        overdue = self.overdue.value()
        for server in scheduler.servers.values():
            for rpc in server.rpcs.values():
                if rpc.hedge or not rpc.waiting:
                    continue
                late = now - rpc.started > overdue * rpc.expected
                # While rows wait, an idle server is better used for those, so only overdue RPCs count.
                if late or not len(scheduler.queues[rpc.teacher]):
                    found.setdefault(rpc.teacher, []).append((rpc, late))
        return found


class _Straggler(NamedTuple):
    """A row that deserves a second attempt: seconds gained, seconds left where it is, whether it is overdue."""

    gain: float
    remaining: float
    late: bool
    rpc: Rpc
    task: ScoreTask


def _by_gain(straggler: _Straggler) -> tuple[float, int]:
    return -straggler.gain, -straggler.task.number


def _stragglers(ready: "_Ready", rpc: Rpc, late: bool, now: float) -> list[_Straggler]:
    """The rows of a suspect RPC that another server would finish clearly sooner."""
    found: list[_Straggler] = []
    remaining = _remaining(rpc, now)
    for task in reversed(rpc.tasks):  # a server answers in order, so the last row is furthest from done
        if task.number not in rpc.waiting or task.hedged or task.done:
            continue
        finish, target = ready.best(rpc, task)
        gain = remaining - finish
        if target is not None and gain > (0.0 if late else _TAIL_GAIN * remaining):
            found.append(_Straggler(gain, remaining, late, rpc, task))
    return found


def _remaining(rpc: Rpc, now: float) -> float:
    """Seconds until the server has finished this RPC and those before it, at its current speed.

    A server that has been silent for a while is expected to stay silent for as long again, whatever its speed was.
    """
    server = rpc.server
    speed = server.throughput.speed(now)
    if not speed:
        return max(now - rpc.started, rpc.expected)
    # A server works in order of arrival, so what was sent later does not delay this RPC.
    later = sum(other.waiting_tokens for other in server.rpcs.values() if other.number > rpc.number)
    return max((server.ahead(now, speed) - later) / speed, server.throughput.since_answer(now))


class _Ready:
    """The servers that can take a row now, and how soon each would finish one.

    Uses arrays because, towards the end of a step, every row in flight is weighed against every server of a large
    fleet.

    Attributes:
        servers: in the order of the estimate; ties go to the first.
    """

    def __init__(self, estimate: CompletionEstimate, now: float) -> None:
        self.servers = [server for server in estimate.servers.values() if server.open(now)]
        self._estimate = estimate
        self._now = now

    @cached_property
    def _ahead(self) -> NDArray[np.float64]:
        return np.array([self._estimate.ahead(server) for server in self.servers], np.float64)

    @cached_property
    def _speed(self) -> NDArray[np.float64]:
        return np.array([self._estimate.speed(server) for server in self.servers], np.float64)

    def best(self, rpc: Rpc, task: ScoreTask) -> tuple[float, ServerLoad | None]:
        """The server, other than the RPC's own, that would finish the row first, and in how many seconds."""
        finish = (self._ahead + task.tokens) / self._speed
        # Excluded: where the row is already, where it failed, and where it must not go.
        away = {rpc.server.address, *task.avoid, *task.barred_now()}
        while True:
            index = int(finish.argmin())
            if np.isinf(finish[index]):
                return float("inf"), None
            if self.servers[index].address not in away:
                return float(finish[index]), self.servers[index]
            finish[index] = np.inf

    def took_a_row(self, server: ServerLoad) -> None:
        """Account for a hedge that was started on a server."""
        ahead = self._estimate.ahead(server) if server.open(self._now) else np.inf
        self._ahead[self.servers.index(server)] = ahead
