"""Rows in, scores out, each exactly once: sends what the scheduler plans and repairs what breaks.

One attempt per RPC. A row that was answered is never sent again; the unanswered rows of a broken RPC go back to the
queue, ahead of the others, and to another server if there is one. Who is to blame decides what happens: the replica
(its life cycle is told), the server's load (nothing is sent there for a while), or the row itself (its future fails).
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping

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
from opd.fleet.membership.availability import Availability
from opd.fleet.membership.life_cycle import ReplicaState
from opd.fleet.membership.outage import Outage
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.rpc_runner import RpcRunner
from opd.fleet.scheduling.budget import RetryBudget, backoff_seconds
from opd.fleet.scheduling.hedging import Hedger
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import Head, Scores

log = logging.getLogger("opd.fleet")

TICK_SECONDS = 0.05
LONGEST_PUSHBACK_SECONDS = 30.0
"""A busy server is asked again after so many seconds at most, whatever it wishes."""
_FIRST_REISSUE_SECONDS = 0.2
_REPLICA_FAULTS = (UnavailableError, DeadlineError, AuthError, ScopeError, CancelledError)
_IDENTITY_FAULTS = (IncompatibleTeacherError, TeacherNotFoundError)


class Dispatcher:
    """Takes rows, has them sent, and delivers their scores.

    Args:
        settings: of the fleet.
        now: the fleet's clock in seconds.
        monitors: of the servers, by address; kept up to date by the owner.
        pools: by teacher; kept up to date by the owner.
        request_id: gives every RPC its id.
        head_of: fetches a teacher's head, to compare hidden states.

    Attributes:
        scheduler, hedger, runner, counters: what it works with.
        numbers: gives every task its number.
        observe: called with (task, scores, seconds since submission) for every answered row.
    """

    def __init__(
        self,
        settings: FleetSettings,
        now: Callable[[], float],
        monitors: Mapping[str, ReplicaMonitor],
        pools: Mapping[str, Pool],
        request_id: Callable[[], str],
        head_of: Callable[[str], Awaitable[Head]],
    ) -> None:
        self.scheduler = Scheduler(settings.calls)
        self.hedger = Hedger(settings.hedge)
        self.counters = FleetCounters()
        self.observe: Callable[[ScoreTask, Scores, float], None] | None = None
        self._settings = settings
        self._now = now
        self._monitors = monitors
        self._pools = pools
        idle = settings.calls.attempt_seconds
        self.runner = RpcRunner(monitors, pools, request_id, now, idle, on_answer=self._answer, on_end=self._ended)
        self._cross_scorer = CrossScorer(settings.health, self.scheduler, self.counters, self, head_of)
        self._availability = Availability(monitors, pools, self.scheduler, settings.outage)
        self._retries = RetryBudget(settings.calls.retry_ratio, settings.calls.retry_rate)
        self._rng = random.Random(0)
        self.numbers = itertools.count()
        self._live: dict[int, ScoreTask] = {}
        self._timed: dict[int, ScoreTask] = {}
        self._taken_back: set[int] = set()
        self._awake = False
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None

    # Rows.

    def submit(self, tasks: Iterable[ScoreTask]) -> None:
        """Take rows; each one's `deliver` is called exactly once, now or later, with scores or an error."""
        if self._closed:
            for task in tasks:
                task.deliver(UnavailableError("the fleet was closed before the row was scored."))
            return
        for task in tasks:
            self._enter(task)
            self.counters.rows_submitted += 1
            self._cross_scorer.begin(task)
        self.wake()
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="fleet ticker")

    def _enter(self, task: ScoreTask, *, urgent: bool = False) -> None:
        self._live[task.number] = task
        if task.deadline != float("inf"):
            self._timed[task.number] = task
        self._pools[task.teacher].rows += 1
        self.scheduler.submit(task, urgent=urgent)

    def cancel(self, task: ScoreTask) -> None:
        """The caller lost interest in a row: nothing is delivered, RPCs that only it needs are cancelled."""
        if not task.done:
            self.counters.rows_cancelled += 1
            self._finish(task)

    def wake(self) -> None:
        """Plan soon: something changed. Many changes in one turn of the loop make one plan."""
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._pump)

    def lost(self, monitor: ReplicaMonitor, teacher: str, reason: str) -> None:
        """A replica was given up: its RPCs are cancelled and their rows go elsewhere."""
        monitor.server.reset()
        for rpc in list(monitor.server.rpcs.values()):
            if rpc.teacher == teacher:
                self.runner.cancel(rpc, reason)

    def outages(self) -> list[Outage]:
        """Teachers that rows wait for and that have no replica which takes rows: none is healthy, or all are busy."""
        return self._availability.outages(self._now())

    async def close(self) -> None:
        """Cancel everything; rows that wait, and those that come later, fail with `UnavailableError`."""
        self._closed = True
        for task in list(self._live.values()):
            self._fail(task, UnavailableError("the fleet was closed before the row was scored."))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self.runner.close()

    # RPCs.

    def _pump(self) -> None:
        self._awake = False
        for rpc in self.scheduler.plan(self._now()):
            first = sum(1 for task in rpc.tasks if task.failures == 0)
            self._retries.first_attempt(first)
            self.hedger.budget.sent(sum(1 for task in rpc.tasks if not task.is_check))
            self._launch(rpc)

    def _launch(self, rpc: Rpc) -> None:
        self.counters.calls += 1
        self.runner.launch(rpc)

    def _answer(self, rpc: Rpc, task: ScoreTask, scores: Scores) -> None:
        if task.number not in rpc.waiting:
            return
        self.scheduler.answered(rpc, task, self._now())
        self.counters.hedges_won += rpc.hedge
        task.answered_by = rpc.server.address
        if self._cross_scorer.hold(task, scores):
            self._leave_rpcs(task)
        else:
            self.deliver_scores(task, scores)
        self.wake()

    def deliver_scores(self, task: ScoreTask, scores: Scores) -> None:
        """The row has its scores; those of a check go to the cross-scorer."""
        self._finish(task)
        self.counters.wire_bytes += scores.wire_bytes
        if not task.is_check:
            self.counters.rows_answered += 1
            self.counters.tokens_answered += task.tokens
            if self.observe is not None:
                self.observe(task, scores, self._now() - task.submitted)
        _deliver(task, scores)

    def _finish(self, task: ScoreTask) -> None:
        """The row needs nothing any more: out of the queue, out of its RPCs, its checks ended."""
        if task.done:
            return
        task.done = True
        self._pools[task.teacher].rows -= 1
        self._live.pop(task.number, None)
        self._timed.pop(task.number, None)
        self.scheduler.withdraw(task)
        self._leave_rpcs(task)
        self._cross_scorer.forget(task)

    def _leave_rpcs(self, task: ScoreTask) -> None:
        """No RPC needs to answer the row any more; one without other rows is cancelled."""
        for other in list(task.rpcs):
            self.scheduler.dropped(other, task, self._now())
            if not other.waiting:
                self.runner.cancel(other)

    def _fail(self, task: ScoreTask, error: OpdError) -> None:
        if not task.done:
            self.counters.rows_failed += not task.is_check
            self._finish(task)
            _deliver(task, error)

    # Cross-scoring.

    def submit_check(self, task: ScoreTask) -> None:
        """See `RowDesk.submit_check`."""
        task.number, task.submitted = next(self.numbers), self._now()
        self._enter(task, urgent=bool(task.barred))
        self.wake()

    def withdraw_check(self, task: ScoreTask) -> None:
        """See `RowDesk.withdraw_check`."""
        self._finish(task)
        task.deliver = _delivered

    def ask_again(self, task: ScoreTask) -> None:
        """See `RowDesk.ask_again`."""
        task.answered_by, task.barred = "", frozenset()
        self.scheduler.submit(task, urgent=True)
        self._cross_scorer.begin(task)
        self.wake()

    def trusts(self, address: str, teacher: str) -> bool:
        """See `RowDesk.trusts`."""
        monitor = self._monitors.get(address)
        life = monitor.lives.get(teacher) if monitor is not None else None
        return life is None or life.state is not ReplicaState.REJECTED

    def reject(self, address: str, teacher: str, reason: str) -> None:
        """See `RowDesk.reject`."""
        monitor = self._monitors.get(address)
        if monitor is not None:
            self.counters.disagreements += monitor.admission.reject(teacher, reason)

    def _ended(self, rpc: Rpc, error: OpdError | None) -> None:
        """Blame and settle: every RPC that was launched comes here once, however it ended."""
        if error is not None:
            self._blame(rpc, error)
        elif not rpc.waiting:
            self._completed(rpc)
        self._settle(rpc, error)
        self.wake()

    def _completed(self, rpc: Rpc) -> None:
        now, monitor = self._now(), self._monitors[rpc.server.address]
        self.hedger.finished(rpc, now)
        life = monitor.lives.get(rpc.teacher)
        if life is not None:
            monitor.apply(rpc.teacher, life.request_answered(now))

    # Repair.

    def _blame(self, rpc: Rpc, error: OpdError) -> None:
        """Tell the replica's life cycle, or its server's load, what the failure says about it."""
        monitor = self._monitors[rpc.server.address]
        life, now = monitor.lives.get(rpc.teacher), self._now()
        self.counters.calls_failed += 1
        log.info("RPC %d to replica %s failed: %s", rpc.number, rpc.server.address, error)
        if isinstance(error, OverloadedError):
            self._push_back(rpc, error, now)
        elif life is None:
            return
        elif isinstance(error, CorruptPayloadError):
            self.counters.corrupt_payloads += 1
            monitor.apply(rpc.teacher, life.sent_corrupt_data(now, str(error)))
        elif isinstance(error, _IDENTITY_FAULTS):
            monitor.apply(rpc.teacher, life.identity_changed(now, f"refused a call: {error}"))
            monitor.ping_soon()
        elif isinstance(error, _REPLICA_FAULTS):
            rpc.server.reset()
            monitor.apply(rpc.teacher, life.request_failed(now, str(error)))
            monitor.ping_soon()

    def _push_back(self, rpc: Rpc, error: OverloadedError, now: float) -> None:
        self.counters.pushbacks += 1
        seconds = min(max(0.01, error.retry_after), LONGEST_PUSHBACK_SECONDS)
        if error.retry_after > seconds:
            log.warning(
                "replica %s is busy and wants to be left alone for %.3g s; it is asked again after %g s",
                *(rpc.server.address, error.retry_after, seconds),
            )
        rpc.server.pushed_back(now, now + seconds)
        asyncio.get_running_loop().call_later(seconds, self.wake)

    def _settle(self, rpc: Rpc, error: OpdError | None) -> None:
        """What happens to the rows that a finished RPC left unanswered."""
        now = self._now()
        taken_back = rpc.number in self._taken_back
        self._taken_back.discard(rpc.number)
        for task in self.scheduler.ended(rpc, now):
            self._cross_scorer.give_way(task)
            if taken_back:
                task.moves += 1
                task.avoid.add(rpc.server.address)
                self.counters.moved += 1
                self.scheduler.submit(task, urgent=True)
                continue
            if error is None:
                error = UnavailableError("the call was cancelled.")
            if isinstance(error, OverloadedError):
                self._again_when_less_busy(task, error, now)
            elif not isinstance(error, (*_REPLICA_FAULTS, *_IDENTITY_FAULTS, CorruptPayloadError)):
                if len(rpc.tasks) == 1:
                    self._fail(task, error)
                else:
                    # One bad row fails the whole RPC: ask for each alone to find it.
                    task.batch_key = ("alone", task.number)
                    self.scheduler.submit(task, urgent=True)
            else:
                self._again(rpc, task, error, now)

    def _again_when_less_busy(self, task: ScoreTask, error: OverloadedError, now: float) -> None:
        since = task.refused_since = task.refused_since or now
        if now - since > self._settings.outage.budget_seconds:
            what = (
                f"a row for teacher {task.teacher!r} was refused for {now - since:.0f} s, more than the outage budget"
            )
            self._fail(task, OutageError(f"{what}: {error}"))
        else:
            self.scheduler.submit(task, urgent=True)

    def _again(self, rpc: Rpc, task: ScoreTask, error: OpdError, now: float) -> None:
        task.failures += 1
        task.avoid.add(rpc.server.address)
        task.hedged = False
        if task.failures >= self._settings.calls.attempts:
            what = f"a row for teacher {task.teacher!r} failed {task.failures} times, the last time: {error}"
            self._fail(task, type(error)(what))
            return
        if task.failures > 1:
            # A row that kills its servers must not take others with it.
            task.batch_key = ("alone", task.number)
        self.counters.reissues += 1
        pause = backoff_seconds(self._settings.calls.backoff_seconds, task.failures, self._rng)
        wait = self._retries.wait_seconds(now)
        if task.failures == 1:
            # Many rows may sit on a server that dies. One re-issue each cannot become a storm: a server that failed
            # gets nothing new until it has proved itself, and then two rows at first.
            wait = min(wait, _FIRST_REISSUE_SECONDS)
        at = now + max(pause, wait)
        self.scheduler.submit_later(task, at)
        asyncio.get_running_loop().call_later(at - now, self.wake)

    # Time.

    async def _tick(self) -> None:
        while self._live:
            await asyncio.sleep(TICK_SECONDS)
            now = self._now()
            self._availability.see_refusals(now)
            self._cross_scorer.sweep(self._long_overdue)
            hedges, stalled = self.hedger.choose(self.scheduler, now)
            for rpc in hedges:
                self.counters.hedges += len(rpc.tasks)
                self._launch(rpc)
            for rpc in stalled:
                self._taken_back.add(rpc.number)
                self.runner.cancel(rpc)
            for task in [task for task in self._timed.values() if task.deadline <= now]:
                self._fail(task, DeadlineError(f"a row for teacher {task.teacher!r} was not scored by its deadline."))
            for outage in self.outages():
                if outage.seconds > outage.budget_seconds:
                    self._give_up(outage)
            self.wake()

    def _long_overdue(self, task: ScoreTask) -> bool:
        now = self._now()
        return any(self.hedger.long_overdue(rpc, now) for rpc in task.rpcs)

    def _give_up(self, outage: Outage) -> None:
        error = (
            f"teacher {outage.teacher!r} has had no usable replica for {outage.seconds:.0f} s, more than the outage "
            f"budget: {outage.reason}; bring one back and resume."
        )
        for task in [task for task in self._live.values() if task.teacher == outage.teacher]:
            self._fail(task, OutageError(error))


def _deliver(task: ScoreTask, outcome: Scores | OpdError) -> None:
    """Hand over the outcome of a row, and with it all that holds the scores: rows and RPCs refer to each other."""
    deliver, task.deliver = task.deliver, _delivered
    deliver(outcome)


def _delivered(outcome: Scores | OpdError) -> None:
    """In the place of a delivery that was made."""
