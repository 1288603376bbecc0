"""Runs RPCs on the servers as asyncio tasks, one attempt each; the dispatcher decides what happens to their rows."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing

from opd.errors import CorruptPayloadError, IncompatibleTeacherError, OpdError, UnavailableError
from opd.fleet.membership.link import ReplicaRequest
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask
from opd.wire.types import Scores

log = logging.getLogger("opd.fleet")

_GRACE_SECONDS = 1.0
"""Seconds that an RPC may outlive its rows' deadline: the dispatcher ends it then, and the replica is not blamed."""


class RpcRunner:
    """Sends RPCs, and reports every answered row and every end.

    Args:
        monitors: the servers' monitors by address, kept up to date by the owner.
        pools: the pools by teacher, kept up to date by the owner.
        request_id: returns an id for each RPC.
        now: the fleet's clock, in seconds.
        idle_seconds: seconds without any message after which an RPC is given up.
        on_answer: called with (rpc, task, scores) for every row, as it arrives.
        on_complete: called with each RPC that has answered all rows that it still had to.
        on_end: called with (rpc, error) once for every RPC that was launched, however it ended. The error is None if it
            was complete, or was cancelled without a reason.
    """

    def __init__(
        self,
        monitors: Mapping[str, ReplicaMonitor],
        pools: Mapping[str, Pool],
        request_id: Callable[[], str],
        now: Callable[[], float],
        idle_seconds: float,
        *,
        on_answer: Callable[[Rpc, ScoreTask, Scores], None],
        on_complete: Callable[[Rpc], None],
        on_end: Callable[[Rpc, OpdError | None], None],
    ) -> None:
        self._monitors = monitors
        self._pools = pools
        self._request_id = request_id
        self._now = now
        self._idle_seconds = idle_seconds
        self._on_answer = on_answer
        self._on_complete = on_complete
        self._on_end = on_end
        self._running: dict[int, asyncio.Task[None]] = {}
        self._reasons: dict[int, str] = {}

    def launch(self, rpc: Rpc) -> None:
        """Send an RPC in the background."""
        running = asyncio.get_running_loop().create_task(self._run(rpc))
        self._running[rpc.number] = running
        # Not in a `finally` of `_run`: a task that is cancelled before it first runs executes none of its code.
        running.add_done_callback(lambda done: self._ended(rpc, done))

    def cancel(self, rpc: Rpc, lost: str = "") -> None:
        """End an RPC. `lost` says why its replica was given up; "" if its rows are merely not needed any more."""
        running = self._running.get(rpc.number)
        if running is not None:
            if lost:
                self._reasons[rpc.number] = lost
            running.cancel()

    async def close(self) -> None:
        """Cancel all RPCs and wait until they have ended."""
        # A copy, because each end removes itself from the dictionary.
        running = list(self._running.values())
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, rpc: Rpc) -> None:
        monitor, pool = self._monitors[rpc.server.address], self._pools[rpc.teacher]
        first = rpc.tasks[0]
        # The latest deadline, because the dispatcher fails rows that expire earlier, and these need not end the others.
        latest = max(task.deadline for task in rpc.tasks)
        timeout = None if latest == float("inf") else max(0.0, latest - self._now()) + _GRACE_SECONDS
        if pool.info is None or pool.identity is None:
            raise UnavailableError(f"no replica of teacher {rpc.teacher!r} has passed its check.")
        weights = pool.identity.weights_hash
        request = ReplicaRequest(
            request_id=self._request_id(),
            info=pool.info,
            items=[task.item for task in rpc.tasks],
            spec=first.spec,
            temperature=first.temperature,
            weights_hash=weights,
            trace=first.trace,
        )
        async with aclosing(monitor.link.score(request, timeout, self._idle_seconds)) as answers:
            async for index, scores in answers:
                if scores.weights_hash != weights:
                    raise IncompatibleTeacherError(
                        f"replica {rpc.server.address} scored rows with other weights than the pool's."
                    )
                self._on_answer(rpc, rpc.tasks[index], scores)
        if rpc.waiting:
            raise CorruptPayloadError(f"replica {rpc.server.address} left {len(rpc.waiting)} rows unanswered.")
        self._on_complete(rpc)

    def _ended(self, rpc: Rpc, running: asyncio.Task[None]) -> None:
        self._running.pop(rpc.number, None)
        lost = self._reasons.pop(rpc.number, "")
        error: OpdError | None = None
        if running.cancelled():
            if lost:
                error = UnavailableError(f"replica {rpc.server.address} was given up: {lost}")
        elif (found := running.exception()) is not None:
            if isinstance(found, OpdError):
                error = found
            else:
                log.error(
                    "RPC %d to replica %s failed with an unexpected error, a bug",
                    rpc.number,
                    rpc.server.address,
                    exc_info=found,
                )
                error = UnavailableError(f"replica {rpc.server.address} could not be called: {found!r}.")
        self._on_end(rpc, error)
