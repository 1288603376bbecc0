"""After an RPC failed: who is to blame, and what happens to the rows that it left unanswered.

The blame is on the replica (its life cycle is told), on the server's load (nothing is sent there for a while), or on a
row itself (its future fails). Other rows return to the queue, ahead of those that wait, and go to another server if
there is one.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping

from opd.errors import (
    AuthError,
    CancelledError,
    CorruptPayloadError,
    DeadlineError,
    IncompatibleTeacherError,
    OpdError,
    OutageError,
    OverloadedError,
    ScopeError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.fleet.cross_score import CrossScorer
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.scheduling.budget import RetryBudget, backoff_seconds, pushback_seconds
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetCounters

log = logging.getLogger("opd.fleet")

LONGEST_PUSHBACK_SECONDS = 30.0
"""Longest pause after a pushback, whatever the server asks for: a wrong value must not stop a run."""
_FIRST_REISSUE_SECONDS = 0.2
_REPLICA_FAULTS = (UnavailableError, DeadlineError, AuthError, ScopeError, CancelledError)
_IDENTITY_FAULTS = (IncompatibleTeacherError, TeacherNotFoundError)


class Repair:
    """Assigns blame for, and settles the rows of, RPCs that ended with an error or with rows unanswered.

    Args:
        settings: the fleet's settings.
        now: the fleet's clock, in seconds.
        monitors: the servers' monitors, by address.
        scheduler: takes rows that are sent again.
        counters: counts what was done.
        cross_scorer: gives up the checks of rows that are sent again.
        fail: ends a row with an error.
        wake: makes the dispatcher plan soon.

    Attributes:
        retries: limits how often rows are sent again.
        taken_back: numbers of RPCs whose rows move to other servers because their own makes no progress.
    """

    def __init__(
        self,
        settings: FleetSettings,
        now: Callable[[], float],
        monitors: Mapping[str, ReplicaMonitor],
        scheduler: Scheduler,
        counters: FleetCounters,
        cross_scorer: CrossScorer,
        *,
        fail: Callable[[ScoreTask, OpdError], None],
        wake: Callable[[], None],
    ) -> None:
        self._settings, self._now, self._monitors = settings, now, monitors
        self._scheduler, self._counters, self._cross_scorer = scheduler, counters, cross_scorer
        self._fail, self._wake = fail, wake
        self.retries = RetryBudget(settings.calls.retry_ratio, settings.calls.retry_rate)
        self.taken_back: set[int] = set()
        self._rng = random.Random(0)

    def blame(self, rpc: Rpc, error: OpdError) -> None:
        """Report a failure to the replica's life cycle or its server's load, depending on what it says about them."""
        monitor = self._monitors[rpc.server.address]
        life, now = monitor.lives.get(rpc.teacher), self._now()
        self._counters.calls_failed += 1
        log.info("RPC %d to replica %s failed: %s", rpc.number, rpc.server.address, error)
        # A busy server is a healthy one: its load is adjusted, its replica is not blamed.
        if isinstance(error, OverloadedError):
            self._push_back(rpc, error, now)
        elif life is None:
            return
        elif isinstance(error, CorruptPayloadError):
            self._counters.corrupt_payloads += 1
            monitor.apply(rpc.teacher, life.sent_corrupt_data(now, str(error)))
        elif isinstance(error, _IDENTITY_FAULTS):
            monitor.apply(rpc.teacher, life.identity_changed(now, f"refused a call: {error}"))
            monitor.ping_soon()
        elif isinstance(error, _REPLICA_FAULTS):
            rpc.server.reset()
            monitor.apply(rpc.teacher, life.request_failed(now, str(error)))
            monitor.ping_soon()

    def _push_back(self, rpc: Rpc, error: OverloadedError, now: float) -> None:
        self._counters.pushbacks += 1
        asked = min(max(0.01, error.retry_after), LONGEST_PUSHBACK_SECONDS)
        seconds = min(pushback_seconds(asked, rpc.server.refusals + 1, self._rng), LONGEST_PUSHBACK_SECONDS)
        if error.retry_after > seconds:
            log.warning(
                "replica %s is overloaded and asks for a pause of %.3g s; it gets calls again after %g s",
                *(rpc.server.address, error.retry_after, seconds),
            )
        rpc.server.pushed_back(now, now + seconds, rpc.started)
        asyncio.get_running_loop().call_later(seconds, self._wake)

    def settle(self, rpc: Rpc, error: OpdError | None) -> None:
        """Decide what happens to the rows that an ended RPC left unanswered."""
        now = self._now()
        taken_back = rpc.number in self.taken_back
        self.taken_back.discard(rpc.number)
        for task in self._scheduler.ended(rpc, now):
            self._cross_scorer.give_way(task)
            if not isinstance(error, OverloadedError):
                task.refused_since = None  # only refusals without a break count as an outage
            if taken_back:
                task.moves += 1
                # `avoid` keeps it from going straight back. A stall is not a failure, so no failed attempt is counted.
                task.avoid.add(rpc.server.address)
                self._counters.moved += 1
                self._scheduler.submit(task, urgent=True)
                continue
            if error is None:
                error = UnavailableError("the call was cancelled.")
            if isinstance(error, OverloadedError):
                self._again_when_less_busy(task, error, now)
            elif not isinstance(error, (*_REPLICA_FAULTS, *_IDENTITY_FAULTS, CorruptPayloadError)):
                if len(rpc.tasks) == 1:
                    self._fail(task, error)
                else:
                    # A single bad row fails the whole RPC; sending each row by itself finds it.
                    task.batch_key = ("alone", task.number)
                    self._scheduler.submit(task, urgent=True)
            else:
                self._again(rpc, task, error, now)

    def _again_when_less_busy(self, task: ScoreTask, error: OverloadedError, now: float) -> None:
        """Queue a refused row again. A refusal is not a failure, so only the outage budget limits it."""
        since = task.refused_since = now if task.refused_since is None else task.refused_since
        if now - since > self._settings.outage.budget_seconds:
            what = (
                f"a row for teacher {task.teacher!r} was refused for {now - since:.0f} s, longer than "
                "outage.budget_seconds"
            )
            self._fail(task, OutageError(f"{what}: {error}"))
        else:
            self._scheduler.submit(task, urgent=True)

    def _again(self, rpc: Rpc, task: ScoreTask, error: OpdError, now: float) -> None:
        """Send a row again after a failed attempt, with backoff and within the retry budget, or let it fail."""
        task.failures += 1
        task.avoid.add(rpc.server.address)
        task.hedged = False  # no attempt is left, so the next one may be hedged again
        if task.failures >= self._settings.calls.attempts:
            what = f"a row for teacher {task.teacher!r} failed {task.failures} times, the last time: {error}"
            self._fail(task, type(error)(what))
            return
        if task.failures > 1:
            # Twice could be chance, but a row that kills its servers must not take other rows of its RPC with it.
            task.batch_key = ("alone", task.number)
        self._counters.reissues += 1
        pause = backoff_seconds(self._settings.calls.backoff_seconds, task.failures, self._rng)
        # Hundreds of rows may be in flight on a server that dies. One re-issue each cannot become a retry storm: a
        # server that failed gets nothing until it has passed its check, and only two rows at first.
        most = _FIRST_REISSUE_SECONDS if task.failures == 1 else math.inf
        at = now + max(pause, self.retries.wait_seconds(now, most))
        self._scheduler.submit_later(task, at)
        asyncio.get_running_loop().call_later(at - now, self._wake)
