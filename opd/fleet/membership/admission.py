"""The check before a replica gets rows: that it is what its pool is, and computes what its pool computes."""

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, OpdError
from opd.fleet.membership.agreement import Identity, distance, probe_item, probe_spec, probe_vector
from opd.fleet.membership.life_cycle import OUTSIDE
from opd.fleet.membership.link import ReplicaRequest
from opd.wire.v1 import teacher_pb2 as pb

if TYPE_CHECKING:
    from opd.fleet.membership.replica_monitor import Owner, ReplicaMonitor

log = logging.getLogger("opd.fleet")

_RECHECK_SECONDS = 10.0
_READY = (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)


class _Disagreement(Exception):
    """The replica does not agree with its pool; says how."""


class Admission:
    """Checks the replicas of one server, in a task of its own: a slow check must not hold up the pings.

    Args:
        monitor: of the server.
        owner: the fleet.
    """

    def __init__(self, monitor: "ReplicaMonitor", owner: "Owner") -> None:
        self._monitor = monitor
        self._owner = owner
        self._open = False
        self._again_at: dict[str, tuple[Identity, float]] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Replicas may be admitted from now on: the fleet knows what its pools are."""
        self._open = True
        self._monitor.ping_soon()

    def forget(self) -> None:
        """Check again now what was rejected: another process answers."""
        self._again_at.clear()

    def recheck(self, teacher: str) -> None:
        """Check a rejected replica again now: what it is compared with has changed."""
        self._again_at.pop(teacher, None)
        self._monitor.ping_soon()

    def start(self) -> None:
        """Check the replicas that must be checked, unless a check is under way."""
        if self._open and (self._task is None or self._task.done()):
            names = [name for name, life in self._monitor.lives.items() if life.state in OUTSIDE]
            if names:
                self._task = asyncio.create_task(self._check_all(names), name=f"admission {self._monitor.address}")

    async def stop(self) -> None:
        """End the check under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @staticmethod
    def ready(info: pb.TeacherInfo) -> bool:
        """Whether a teacher's server says that it can serve it."""
        return info.state in _READY

    async def _check_all(self, names: list[str]) -> None:
        for name in names:
            info = self._monitor.infos[name]
            known, not_before = self._again_at.get(name, (None, 0.0))
            if known == Identity.of(info) and self._owner.now() < not_before:
                continue
            await self._check(name, info)

    async def _check(self, name: str, info: pb.TeacherInfo) -> None:
        monitor, life, identity = self._monitor, self._monitor.lives[name], Identity.of(info)
        rejected = postponed = ""
        pause = 0.0
        try:
            if self.ready(info):
                await self._compare(name, info)
            else:
                state = pb.TeacherState.Name(info.state).removeprefix("TEACHER_STATE_").lower()
                postponed = f"its state is {state}"
        except _Disagreement as found:
            rejected, pause = str(found), _RECHECK_SECONDS
        except OpdError as error:
            postponed, pause = f"its check failed: {error}", self._owner.settings.health.cool_off_seconds
        now = self._owner.now()
        if life.state not in OUTSIDE or monitor.infos[name] is not info:
            # It died, retired or was described anew meanwhile: only a pass of what it still is counts.
            if rejected or postponed or Identity.of(monitor.infos[name]) != identity or life.state not in OUTSIDE:
                return
        elif rejected or postponed:
            self._again_at[name] = (identity, now + pause)
        if rejected:
            monitor.apply(name, life.rejected(now, rejected))
        elif postponed:
            if life.reason != postponed:
                log.warning("replica %s of %r is not used: %s", monitor.address, name, postponed)
            monitor.apply(name, life.postponed(now, postponed))
        else:
            self._owner.pool(name).join(monitor.infos[name])
            monitor.apply(name, life.admitted(now))

    async def _compare(self, name: str, info: pb.TeacherInfo) -> None:
        """Compare a replica with its pool.

        Raises:
            _Disagreement: it is something else, or computes something else.
            OpdError: it could not be compared.
        """
        settings, pool = self._owner.settings, self._owner.pool(name)
        identity = pool.choose({self._monitor.address: info}, settings.expected_weights.get(name, ""))
        difference = Identity.of(info).differences(identity)
        if difference:
            raise _Disagreement(f"it has {difference} in its pool")
        vector = await self.probe(info, max(10.0, settings.health.ping_timeout_seconds))
        if vector is None:
            return
        gap = self._monitor.agreement[name] = distance(vector, pool.settle_reference([vector]))
        if gap > settings.health.agreement_nats:
            tolerance = f"more than the tolerance of {settings.health.agreement_nats:.3g}"
            raise _Disagreement(f"it disagrees with its pool by up to {gap:.3g} nats on the probe, {tolerance}")

    async def probe(self, info: pb.TeacherInfo, timeout: float) -> NDArray[np.float32] | None:
        """[T] log-probs of the probe in nats from this replica; None when it serves nothing comparable."""
        spec = probe_spec(info)
        if spec is None:
            return None
        item = probe_item(info, self._owner.settings.health.agreement_tokens)
        request = ReplicaRequest(f"probe-{self._owner.now():.6f}", info, [item], spec, 1.0, info.weights_hash)
        async with aclosing(self._monitor.link.score(request, timeout, timeout)) as answers:
            async for _, scores in answers:
                return probe_vector(scores)
        raise CorruptPayloadError(f"replica {self._monitor.address} sent no answer to the probe.")
