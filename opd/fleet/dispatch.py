"""Rows in, scores out, each exactly once: runs the calls that the scheduler plans and repairs what breaks.

One attempt per RPC. A row that was answered is never sent again; the unanswered rows of a broken call go back to
the queue, ahead of the others, and elsewhere if there is an elsewhere. Who is to blame decides what happens: the
replica (its life cycle hears of it), the server's load (its lane pauses), or the row itself (its future fails).
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

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
from opd.fleet.membership.link import ScoreCall
from opd.fleet.membership.outage import Outage
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import Server
from opd.fleet.scheduling.budget import RetryBudget, backoff_seconds
from opd.fleet.scheduling.hedging import Hedger
from opd.fleet.scheduling.in_flight import Call, Job
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import PayloadSpec, ScoreItem, Scores

log = logging.getLogger("opd.fleet")

TICK_SECONDS = 0.05
LONGEST_PUSHBACK_SECONDS = 30.0
"""A busy server is asked again after so many seconds at most, whatever it wishes."""
_FIRST_REISSUE_SECONDS = 0.2
_REPLICA_FAULTS = (UnavailableError, DeadlineError, AuthError, ScopeError, CancelledError)
_DOUBTS = (IncompatibleTeacherError, TeacherNotFoundError)


@dataclass(slots=True, eq=False)
class Cargo:
    """What a row carries: item, payload, where the result goes, the caller's trace, since when servers are too busy."""

    item: ScoreItem
    spec: PayloadSpec
    temperature: float
    deliver: Callable[[Scores | OpdError], None]
    trace: tuple[tuple[str, str], ...] = ()
    refused_since: float | None = None


class Dispatcher:
    """Runs calls on the servers.

    Args:
        settings: of the fleet.
        now: the fleet's clock in seconds.
        servers: by address; kept up to date by the owner.
        pools: by teacher; kept up to date by the owner.
        client: name of this client, the prefix of request ids.

    Attributes:
        scheduler, hedger, counters: what it works with.
        observe: called with (job, scores, seconds since submission) for every answered row.
    """

    def __init__(
        self,
        settings: FleetSettings,
        now: Callable[[], float],
        servers: Mapping[str, Server],
        pools: Mapping[str, Pool],
        client: str,
    ) -> None:
        self.scheduler = Scheduler(settings.calls)
        self.hedger = Hedger(settings.hedge)
        self.counters = FleetCounters()
        self.observe: Callable[[Job, Scores, float], None] | None = None
        self._settings = settings
        self._now = now
        self._servers = servers
        self._pools = pools
        self._client = client
        self._nonce = f"{random.SystemRandom().getrandbits(32):08x}"
        self._retries = RetryBudget(settings.calls.retry_ratio, settings.calls.retry_rate)
        self._rng = random.Random(0)
        self._live: dict[int, Job] = {}
        self._timed: dict[int, Job] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lost: dict[int, str] = {}
        self._taken_back: set[int] = set()
        self._stirred = False
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None

    # Rows.

    def submit(self, jobs: Iterable[Job]) -> None:
        """Take rows; each one's `deliver` is called exactly once, now or later, with scores or an error."""
        if self._closed:
            for job in jobs:
                job.cargo.deliver(UnavailableError("the fleet was closed before the row was scored."))
            return
        for job in jobs:
            self._live[job.number] = job
            if job.deadline != float("inf"):
                self._timed[job.number] = job
            self._pools[job.teacher].rows += 1
            self.counters.rows_submitted += 1
            self.scheduler.submit(job)
        self.stir()
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="fleet ticker")

    def cancel(self, job: Job) -> None:
        """The caller lost interest in a row: nothing is delivered, running calls that only it needs are cancelled."""
        if not job.done:
            self.counters.rows_cancelled += 1
            self._finish(job)

    def stir(self) -> None:
        """Plan soon: something changed. Many changes in one turn of the loop make one plan."""
        if not self._stirred:
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._pump)

    def lost(self, server: Server, teacher: str, reason: str) -> None:
        """A replica was condemned: its calls are cancelled and their rows go elsewhere."""
        server.lane.reset()
        for call in list(server.lane.calls.values()):
            if call.teacher == teacher:
                self._lost[call.number] = reason
                self._cancel(call)

    def outages(self) -> list[Outage]:
        """Teachers that rows wait for and that have no replica which takes rows: none is healthy, or all are busy."""
        now, budget = self._now(), self._settings.outage.budget_seconds
        return [
            Outage(pool.name, now - since, pool.rows, self._why(pool.name), budget)
            for pool in self._pools.values()
            if (since := pool.out_since) is not None and pool.rows
        ]

    async def close(self) -> None:
        """Cancel everything; rows that wait, and those that come later, fail with `UnavailableError`."""
        self._closed = True
        for job in list(self._live.values()):
            self._fail(job, UnavailableError("the fleet was closed before the row was scored."))
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Calls.

    def _pump(self) -> None:
        self._stirred = False
        for call in self.scheduler.plan(self._now()):
            first = sum(1 for job in call.jobs if job.failures == 0)
            self._retries.first_attempt(first)
            self.hedger.budget.sent(len(call.jobs))
            self._launch(call)

    def _launch(self, call: Call) -> None:
        self.counters.calls += 1
        task = asyncio.get_running_loop().create_task(self._ask(call))
        self._tasks[call.number] = task
        # Outside the task: one that is cancelled before its first turn runs no line of its own, `finally` neither.
        task.add_done_callback(lambda done: self._ended(call, done))

    def _cancel(self, call: Call) -> None:
        task = self._tasks.get(call.number)
        if task is not None:
            task.cancel()

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        """Blame and settle: every call that was launched comes here once, however it ended."""
        lost = self._lost.pop(call.number, None)
        self._tasks.pop(call.number, None)
        error: OpdError | None = None
        if task.cancelled():
            if lost is not None:
                error = UnavailableError(f"replica {call.lane.key} was given up: {lost}")
        elif (found := task.exception()) is not None:
            if isinstance(found, OpdError):
                error = found
            else:
                log.error("a call to replica %s stumbled", call.lane.key, exc_info=found)
                error = UnavailableError(f"replica {call.lane.key} answered nonsense: {found!r}.")
            self._blame(call, error)
        self._settle(call, error)
        self.stir()

    async def _ask(self, call: Call) -> None:
        server, pool = self._servers[call.lane.key], self._pools[call.teacher]
        now = self._now()
        cargo: Cargo = call.jobs[0].cargo
        latest = max(job.deadline for job in call.jobs)
        timeout = None if latest == float("inf") else max(0.01, latest - now)
        if pool.info is None or pool.identity is None:
            raise UnavailableError(f"teacher {call.teacher!r} has no replica that was admitted.")
        weights = pool.identity.weights_hash
        request = ScoreCall(
            request_id=f"{self._client}-{self._nonce}-{call.number}",
            info=pool.info,
            items=[job.cargo.item for job in call.jobs],
            spec=cargo.spec,
            temperature=cargo.temperature,
            weights_hash=weights,
            trace=cargo.trace,
        )
        async with aclosing(server.link.score(request, timeout, self._settings.calls.attempt_seconds)) as answers:
            async for index, scores in answers:
                if scores.weights_hash != weights:
                    raise IncompatibleTeacherError(f"replica {call.lane.key} answered with other weights.")
                self._answer(call, call.jobs[index], scores)
        if call.waiting:
            raise CorruptPayloadError(f"replica {call.lane.key} left {len(call.waiting)} rows unanswered.")
        now = self._now()
        self.hedger.finished(call, now)
        life = server.lives.get(call.teacher)
        if life is not None:
            server.tell(call.teacher, life.request_answered(now))

    def _answer(self, call: Call, job: Job, scores: Scores) -> None:
        if job.number not in call.waiting:
            return
        now = self._now()
        self.scheduler.answered(call, job, now)
        self.counters.rows_answered += 1
        self.counters.tokens_answered += job.tokens
        self.counters.wire_bytes += scores.wire_bytes
        self.counters.hedges_won += call.hedge
        self._finish(job)
        if self.observe is not None:
            self.observe(job, scores, now - job.submitted)
        _deliver(job, scores)
        self.stir()

    def _finish(self, job: Job) -> None:
        """The row needs nothing any more: out of the queue, out of its calls; a call without rows is cancelled."""
        job.done = True
        self._pools[job.teacher].rows -= 1
        self._live.pop(job.number, None)
        self._timed.pop(job.number, None)
        self.scheduler.withdraw(job)
        for other in list(job.calls):
            self.scheduler.dropped(other, job, self._now())
            if not other.waiting:
                self._cancel(other)

    # Repair.

    def _blame(self, call: Call, error: OpdError) -> None:
        """Tell the replica's life cycle, or its lane, what the failure says about it."""
        server = self._servers[call.lane.key]
        life, now = server.lives.get(call.teacher), self._now()
        self.counters.calls_failed += 1
        log.info("call %d to replica %s failed: %s", call.number, call.lane.key, error)
        if isinstance(error, OverloadedError):
            self._push_back(call, error, now)
        elif life is None:
            return
        elif isinstance(error, CorruptPayloadError):
            self.counters.refused_payloads += 1
            server.tell(call.teacher, life.lied(now, str(error)))
        elif isinstance(error, _DOUBTS):
            server.tell(call.teacher, life.doubted(now, f"refused a call: {error}"))
            server.wake()
        elif isinstance(error, _REPLICA_FAULTS):
            call.lane.reset()
            server.tell(call.teacher, life.request_failed(now, str(error)))
            server.wake()

    def _push_back(self, call: Call, error: OverloadedError, now: float) -> None:
        self.counters.pushbacks += 1
        seconds = min(max(0.01, error.retry_after), LONGEST_PUSHBACK_SECONDS)
        if error.retry_after > seconds:
            log.warning(
                "replica %s is busy and wants to be left alone for %.3g s; it is asked again after %g s",
                *(call.lane.key, error.retry_after, seconds),
            )
        call.lane.pushed_back(now, now + seconds)
        asyncio.get_running_loop().call_later(seconds, self.stir)

    def _settle(self, call: Call, error: OpdError | None) -> None:
        """What happens to the rows that a finished call left unanswered."""
        now = self._now()
        taken_back = call.number in self._taken_back
        self._taken_back.discard(call.number)
        for job in self.scheduler.ended(call, now):
            if taken_back:
                job.moves += 1
                job.avoid.add(call.lane.key)
                self.counters.moved += 1
                self.scheduler.submit(job, urgent=True)
                continue
            if error is None:
                error = UnavailableError("the call was cancelled.")
            if isinstance(error, OverloadedError):
                self._again_when_less_busy(job, error, now)
            elif not isinstance(error, (*_REPLICA_FAULTS, *_DOUBTS, CorruptPayloadError)):
                if len(call.jobs) == 1:
                    self._fail(job, error)
                else:
                    # One bad row fails the whole call: ask for each alone to find it.
                    job.batch_key = ("alone", job.number)
                    self.scheduler.submit(job, urgent=True)
            else:
                self._again(call, job, error, now)

    def _again_when_less_busy(self, job: Job, error: OverloadedError, now: float) -> None:
        since = job.cargo.refused_since = job.cargo.refused_since or now
        if now - since > self._settings.outage.budget_seconds:
            what = f"a row for teacher {job.teacher!r} was refused for {now - since:.0f} s, more than the outage budget"
            self._fail(job, OutageError(f"{what}: {error}"))
        else:
            self.scheduler.submit(job, urgent=True)

    def _again(self, call: Call, job: Job, error: OpdError, now: float) -> None:
        job.failures += 1
        job.avoid.add(call.lane.key)
        job.hedged = False
        if job.failures >= self._settings.calls.attempts:
            what = f"a row for teacher {job.teacher!r} failed {job.failures} times, the last time: {error}"
            self._fail(job, type(error)(what))
            return
        if job.failures > 1:
            # A row that kills its servers must not take others with it.
            job.batch_key = ("alone", job.number)
        self.counters.reissues += 1
        pause = backoff_seconds(self._settings.calls.backoff_seconds, job.failures, self._rng)
        wait = self._retries.wait_seconds(now)
        if job.failures == 1:
            # Many rows may sit on a server that dies. One re-issue each cannot become a storm: a server that failed
            # gets nothing new until it has proved itself, and then two rows at first.
            wait = min(wait, _FIRST_REISSUE_SECONDS)
        at = now + max(pause, wait)
        self.scheduler.submit_later(job, at)
        asyncio.get_running_loop().call_later(at - now, self.stir)

    def _fail(self, job: Job, error: OpdError) -> None:
        if not job.done:
            self.counters.rows_failed += 1
            self._finish(job)
            _deliver(job, error)

    # Time.

    async def _tick(self) -> None:
        while self._live:
            await asyncio.sleep(TICK_SECONDS)
            now = self._now()
            self._see_refusals(now)
            hedges, stalled = self.hedger.choose(self.scheduler, now)
            for call in hedges:
                self.counters.hedges += len(call.jobs)
                self._launch(call)
            for call in stalled:
                self._taken_back.add(call.number)
                self._cancel(call)
            for job in [job for job in self._timed.values() if job.deadline <= now]:
                self._fail(job, DeadlineError(f"a row for teacher {job.teacher!r} was not scored by its deadline."))
            for outage in self.outages():
                if outage.seconds > outage.budget_seconds:
                    self._give_up(outage)
            self.stir()

    def _see_refusals(self, now: float) -> None:
        """Note since when every replica of a teacher that would take rows refuses them as too busy."""
        for pool in self._pools.values():
            lanes = self.scheduler.serving(pool.name) if pool.rows else []
            since = [lane.refused_since for lane in lanes if lane.refuses(now)]
            pool.refused_since = max(since) if lanes and len(since) == len(lanes) else None

    def _give_up(self, outage: Outage) -> None:
        for job in [job for job in self._live.values() if job.teacher == outage.teacher]:
            self._fail(
                job,
                OutageError(
                    f"teacher {outage.teacher!r} has had no usable replica for {outage.seconds:.0f} s, more than the "
                    f"outage budget: {outage.reason}; bring one back and resume."
                ),
            )

    def _why(self, teacher: str) -> str:
        now = self._now()
        reasons = [
            f"{server.address} is {life.state}, "
            + ("but busy: it refuses calls" if life.usable and server.lane.refuses(now) else life.reason)
            for server in self._servers.values()
            if (life := server.lives.get(teacher)) is not None
        ]
        return "; ".join(reasons) or "no replica is listed"


def _deliver(job: Job, outcome: Scores | OpdError) -> None:
    """Hand over the outcome of a row, and with it all that holds the scores: rows and calls refer to each other."""
    deliver, job.cargo.deliver = job.cargo.deliver, _nobody
    deliver(outcome)


def _nobody(outcome: Scores | OpdError) -> None:
    """In the place of a delivery that was made."""
