"""Rows in, scores out, each exactly once: sends the RPCs that the scheduler plans, and repairs what fails.

Each RPC is attempted once. A row that was answered is never sent again; `opd.fleet.repair` decides what happens to the
unanswered rows of an RPC that failed.

Everything runs on one asyncio loop without locks: a method that does not await cannot be interrupted, so every change
to a task, its RPCs and the queues is atomic.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from opd.errors import (
    CancelledError,
    DeadlineError,
    OpdError,
    OutageError,
    UnavailableError,
)
from opd.fleet.cross_score import CrossScorer, RowDesk
from opd.fleet.membership.availability import Availability
from opd.fleet.membership.life_cycle import ReplicaState
from opd.fleet.membership.outage import Outage
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.repair import Repair
from opd.fleet.rpc_runner import RpcRunner
from opd.fleet.scheduling.hedging import Hedger
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import Head, Scores

log = logging.getLogger("opd.fleet")

TICK_SECONDS = 0.05


class Dispatcher(RowDesk):
    """Takes rows, has them sent, and delivers their scores.

    Args:
        settings: the fleet's settings.
        now: the fleet's clock, in seconds.
        monitors: the servers' monitors by address, kept up to date by the owner.
        pools: the pools by teacher, kept up to date by the owner.
        request_id: returns an id for each RPC.
        head_of: fetches a teacher's head, through which hidden states are compared.

    Attributes:
        scheduler, hedger, runner, counters: the parts it works with.
        numbers: yields a number for each task.
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
        self.runner = RpcRunner(
            monitors,
            pools,
            request_id,
            now,
            idle,
            on_answer=self._answer,
            on_complete=self._completed,
            on_end=self._ended,
        )
        self._cross_scorer = CrossScorer(settings.health, self.scheduler, self.counters, self, head_of)
        self._availability = Availability(monitors, pools, self.scheduler, settings.outage)
        self._repair = Repair(
            settings,
            now,
            monitors,
            self.scheduler,
            self.counters,
            self._cross_scorer,
            fail=self._fail,
            wake=self.wake,
        )
        self.numbers = itertools.count()
        self._live: dict[int, ScoreTask] = {}
        # The tasks of `_live` that have a deadline: most runs set none, and every tick goes through these.
        self._timed: dict[int, ScoreTask] = {}
        self._awake = False
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None

    # Rows.

    def submit(self, tasks: Iterable[ScoreTask]) -> None:
        """Take rows. The `deliver` of each is called exactly once, now or later, with scores or an error."""
        if self._closed:
            for task in tasks:
                task.deliver(UnavailableError("the fleet was closed before the row was scored."))
            return
        for task in tasks:
            self._enter(task)
            self.counters.rows_submitted += 1
            self._cross_scorer.begin(task)
        self.wake()
        # The ticker ends when no row is live, so that an idle fleet does not wake up twenty times a second.
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="fleet ticker")

    def _enter(self, task: ScoreTask, *, urgent: bool = False) -> None:
        self._live[task.number] = task
        if task.deadline != float("inf"):
            self._timed[task.number] = task
        # Checks count too: `_finish` subtracts them like any row.
        self._pools[task.teacher].rows += 1
        self.scheduler.submit(task, urgent=urgent)

    def cancel(self, task: ScoreTask) -> None:
        """Withdraw a row whose caller lost interest; RPCs that only it needs are cancelled."""
        if not task.done:
            self.counters.rows_cancelled += 1
            self._finish(task)
            # Its future is cancelled already, but waiters learn of it only through this.
            _deliver(task, CancelledError("the caller withdrew the row before it was scored."))

    def wake(self) -> None:
        """Plan soon, because something changed. Several changes in one turn of the loop cause one plan."""
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._pump)

    def lost(self, monitor: ReplicaMonitor, teacher: str, reason: str) -> None:
        """Cancel the RPCs of a replica that was given up; their rows go elsewhere."""
        monitor.server.reset()
        # A replica is one teacher on one server, so RPCs of the server's other teachers continue.
        for rpc in list(monitor.server.rpcs.values()):
            if rpc.teacher == teacher:
                self.runner.cancel(rpc, reason)

    def outages(self) -> list[Outage]:
        """Teachers with waiting rows but without a replica that takes them: none is healthy, or all are too busy."""
        return self._availability.outages(self._now())

    async def close(self) -> None:
        """Cancel everything. Rows that wait, and rows that come later, fail with `UnavailableError`."""
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
            self._repair.retries.first_attempt(first)
            self.hedger.budget.sent(sum(1 for task in rpc.tasks if not task.is_check))
            self._launch(rpc)

    def _launch(self, rpc: Rpc) -> None:
        self.counters.calls += 1
        self.runner.launch(rpc)

    def _answer(self, rpc: Rpc, task: ScoreTask, scores: Scores) -> None:
        if task.number not in rpc.waiting:  # answered by a hedge, or withdrawn, while these scores were on their way
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
        """Deliver a row's scores; those of a check go to the cross-scorer."""
        self._finish(task)
        self.counters.wire_bytes += scores.wire_bytes
        if not task.is_check:
            self.counters.rows_answered += 1
            self.counters.tokens_answered += task.tokens
        try:
            # Before delivery, so that the one who gets a row's scores finds it in the metrics.
            if self.observe is not None and not task.is_check:
                self.observe(task, scores, self._now() - task.submitted)
        finally:  # `observe` is the caller's code: if it raises, the row must be delivered all the same
            _deliver(task, scores)

    def _finish(self, task: ScoreTask) -> None:
        """Remove a row that is done from the queue and from its RPCs, and end its check."""
        if task.done:
            return
        task.done = True  # first, because ending its RPCs and checks below calls this for the same task again
        self._pools[task.teacher].rows -= 1
        self._live.pop(task.number, None)
        self._timed.pop(task.number, None)
        self.scheduler.withdraw(task)
        self._leave_rpcs(task)
        self._cross_scorer.forget(task)

    def _leave_rpcs(self, task: ScoreTask) -> None:
        """Take the row out of its RPCs; an RPC without other rows is cancelled."""
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
        task.number, task.submitted = next(self.numbers), self._now()
        self._enter(task, urgent=bool(task.barred))
        self.wake()

    def withdraw_check(self, task: ScoreTask) -> None:
        self._finish(task)
        # Its scores may be on their way, and must go nowhere.
        task.deliver = _delivered

    def ask_again(self, task: ScoreTask) -> None:
        # Not `_enter`: the row was never finished, so it is still live and counted.
        task.answered_by, task.barred = "", frozenset()
        self.scheduler.submit(task, urgent=True)
        self._cross_scorer.begin(task)
        self.wake()

    def trusts(self, address: str, teacher: str) -> bool:
        monitor = self._monitors.get(address)
        life = monitor.lives.get(teacher) if monitor is not None else None
        return life is None or life.state is not ReplicaState.REJECTED

    def reject(self, address: str, teacher: str, reason: str) -> None:
        monitor = self._monitors.get(address)
        if monitor is not None:
            self.counters.disagreements += monitor.admission.reject(teacher, reason)

    def _ended(self, rpc: Rpc, error: OpdError | None) -> None:
        """Handle the end of an RPC, which is reported once for each that was launched, however it ended."""
        if error is not None:
            self._repair.blame(rpc, error)
        self._repair.settle(rpc, error)
        self.wake()

    def _completed(self, rpc: Rpc) -> None:
        now, monitor = self._now(), self._monitors[rpc.server.address]
        self.hedger.finished(rpc, now)
        life = monitor.lives.get(rpc.teacher)
        if life is not None:
            monitor.apply(rpc.teacher, life.request_answered(now))

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
                # Tells `settle` that its rows were moved on purpose: nothing failed, so no failed attempt is counted.
                self._repair.taken_back.add(rpc.number)
                self.runner.cancel(rpc)
            for task in [task for task in self._timed.values() if task.deadline <= now]:
                self._fail(
                    task,
                    DeadlineError(
                        f"a row for teacher {task.teacher!r} was not scored by its deadline; allow more time "
                        "(calls.row_seconds) or add replicas."
                    ),
                )
            for outage in self.outages():
                if outage.seconds > outage.budget_seconds:
                    self._give_up(outage)
            self.wake()

    def _long_overdue(self, task: ScoreTask) -> bool:
        now, seconds = self._now(), self._settings.health.cross_score_seconds
        return any(self.hedger.long_overdue(rpc, now, seconds) for rpc in task.rpcs)

    def _give_up(self, outage: Outage) -> None:
        error = (
            f"teacher {outage.teacher!r} has had no usable replica for {outage.seconds:.0f} s, longer than "
            f"outage.budget_seconds: {outage.reason}; bring one back and resume."
        )
        for task in [task for task in self._live.values() if task.teacher == outage.teacher]:
            self._fail(task, OutageError(error))


def _deliver(task: ScoreTask, outcome: Scores | OpdError) -> None:
    """Call `deliver` and drop it: it holds the scores, and tasks and RPCs are cycles, collected late."""
    deliver, task.deliver = task.deliver, _delivered
    deliver(outcome)


def _delivered(outcome: Scores | OpdError) -> None:
    """Replaces a task's `deliver` after it was called."""
