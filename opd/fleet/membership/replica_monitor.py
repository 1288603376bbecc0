"""The watch over one server: probes, restarts, draining, and the gate its replicas pass before they serve.

One task per server. It asks `GetLoad` while all is well and `Describe` while a replica is unproven; what it learns
goes into the replicas' life cycles. It decides nothing about rows: the core does, when a life cycle changes.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, OpdError
from opd.fleet.membership.agreement import Identity, distance, probe_item, probe_spec, probe_vector
from opd.fleet.membership.life_cycle import ReplicaLife, ReplicaState, Transition
from opd.fleet.membership.link import Description, ReplicaLink, ScoreCall
from opd.fleet.membership.pool import Pool
from opd.fleet.scheduling.in_flight import Lane
from opd.fleet.settings import FleetSettings
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")

_RETRY_PAUSE = 0.2
_RECHECK_SECONDS = 10.0
_READY = (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)


class Owner(Protocol):
    """What a server needs of the fleet it belongs to."""

    settings: FleetSettings

    def now(self) -> float:
        """Seconds of the fleet's clock."""
        ...

    def pool(self, teacher: str) -> Pool:
        """The pool of a teacher, made when it is new."""
        ...

    def wants(self, teacher: str, address: str) -> bool:
        """Whether this replica of a teacher may be used at all."""
        ...

    def moved(self, server: "Server", teacher: str, change: Transition) -> None:
        """A replica changed its state."""
        ...

    def looked(self, server: "Server") -> None:
        """The server was asked for the first time, with or without success."""
        ...


class Server:
    """One server of the fleet and its replicas.

    Attributes:
        address: where it is.
        link: the connection.
        lane: what the scheduler knows of it.
        lives: health of its replicas, by teacher.
        infos: its last description, by teacher.
        instance: random id of its process, "" before the first answer.
        version: version of its software.
        load: its last load report.
        agreement: teacher to the probe's difference from the pool in nats.
        error: why it did not answer the last time, None when it did.
        gated: set once the fleet has elected its pools; replicas are admitted only then.
    """

    def __init__(self, address: str, link: ReplicaLink, lane: Lane, owner: Owner) -> None:
        self.address = address
        self.link = link
        self.lane = lane
        self.lives: dict[str, ReplicaLife] = {}
        self.infos: dict[str, pb.TeacherInfo] = {}
        self.instance = ""
        self.version = ""
        self.load: pb.GetLoadResponse | None = None
        self.agreement: dict[str, float] = {}
        self.error: OpdError | None = None
        self.looked = False
        self.leaving = False
        self.gated = asyncio.Event()
        self._owner = owner
        self._wake = asyncio.Event()
        self._refused: dict[str, tuple[Identity | None, float]] = {}
        self._task: asyncio.Task[None] | None = None
        self._gate: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._watch(), name=f"watch {self.address}")

    async def stop(self) -> None:
        """End the watch and close the connection."""
        tasks = [task for task in (self._task, self._gate) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.link.close()

    def wake(self) -> None:
        """Probe now: something about it looks wrong."""
        self._wake.set()

    def recheck(self, teacher: str) -> None:
        """Check a refused replica again now: what it is compared with has changed."""
        self._refused.pop(teacher, None)
        self.wake()

    def tell(self, teacher: str, change: Transition | None) -> None:
        """Announce what an event did to a replica's life cycle, if it did anything."""
        if change is None:
            return
        passing = change.after in (ReplicaState.HEALTHY, ReplicaState.SUSPECT)
        level = logging.INFO if passing else logging.WARNING
        where = f"{self.address} of {teacher!r}"
        log.log(level, "replica %s: %s -> %s, %s", where, change.before, change.after, change.reason)
        self._owner.moved(self, teacher, change)

    def usable(self) -> list[str]:
        """Teachers whose replica here may get rows."""
        return [name for name, life in self.lives.items() if life.usable]

    # The watch.

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except asyncio.CancelledError:
                raise
            except OpdError as error:
                self._unanswered(error)
            except Exception as error:
                log.exception("the watch over replica %s stumbled", self.address)
                self._unanswered(CorruptPayloadError(f"replica {self.address} answered nonsense: {error!r}."))
            if not self.looked:
                self.looked = True
                self._owner.looked(self)
            await self._pause()

    def _unanswered(self, error: OpdError) -> None:
        self.error = error
        now = self._owner.now()
        for name, life in list(self.lives.items()):
            self.tell(name, life.probe_failed(now, str(error)))

    async def _pause(self) -> None:
        health = self._owner.settings.health
        states = {life.state for life in self.lives.values()}
        if ReplicaState.SUSPECT in states and self.error is not None:
            seconds = _RETRY_PAUSE
        elif self.error is not None or states & {ReplicaState.CONDEMNED, ReplicaState.STALE} or not states:
            seconds = health.revive_seconds
        else:
            seconds = health.probe_seconds
        if self.error is not None and ReplicaState.SUSPECT not in states:
            await self.link.reconnect()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _look(self) -> None:
        timeout = self._owner.settings.health.probe_timeout_seconds
        states = {life.state for life in self.lives.values()}
        if not self.instance or not states or states - {ReplicaState.HEALTHY, ReplicaState.SUSPECT}:
            await self._describe(timeout)
        try:
            self.load = await self.link.load(timeout)
        except OpdError:
            self.load = None
            raise
        if self.load.instance_id != self.instance:
            await self._describe(timeout)
        self.error = None
        now = self._owner.now()
        loads = {entry.teacher: entry.state for entry in self.load.teachers}
        for name, life in list(self.lives.items()):
            if loads.get(name, pb.TEACHER_STATE_READY) == pb.TEACHER_STATE_DRAINING:
                self.tell(name, life.retired(now, "draining"))
            else:
                self.tell(name, life.probe_answered(now))
        self._start_gate()

    async def _describe(self, timeout: float) -> None:
        found = await self.link.describe(timeout)
        now = self._owner.now()
        if self.instance and found.instance_id != self.instance:
            self.lane.reset()
            self._refused.clear()
            for name, life in list(self.lives.items()):
                self.tell(name, life.restarted(now))
        self.instance, self.version = found.instance_id, found.server_version
        self._take(found, now)

    def _take(self, found: Description, now: float) -> None:
        wanted = {name: info for name, info in found.teachers.items() if self._owner.wants(name, self.address)}
        for name, info in wanted.items():
            life = self.lives.setdefault(name, ReplicaLife(self._owner.settings.health, now))
            known = self.infos.get(name, info)
            self.infos[name] = info
            if known.weights_hash != info.weights_hash:
                self.tell(name, life.doubted(now, "its weights were replaced"))
            elif life.state is ReplicaState.RETIRED and info.state in _READY and not self.leaving:
                self.tell(name, life.doubted(now, "serves again, to be checked"))
        for name in set(self.lives) - set(wanted):
            self.tell(name, self.lives[name].retired(now, "no longer served here"))

    # The gate.

    def _start_gate(self) -> None:
        """Check the unproven replicas in a task of its own: a slow self-test must not hold up the probes."""
        if self.gated.is_set() and not self.leaving and (self._gate is None or self._gate.done()):
            names = [name for name, life in self.lives.items() if life.state is ReplicaState.STALE]
            if names:
                self._gate = asyncio.create_task(self._check(names), name=f"gate {self.address}")

    async def _check(self, names: list[str]) -> None:
        for name in names:
            life, info, now = self.lives[name], self.infos[name], self._owner.now()
            not_before = self._refused.get(name, (None, 0.0))
            if not_before[0] == Identity.of(info) and now < not_before[1]:
                continue
            reason, pause = await self._objection(name, info)
            now = self._owner.now()
            if life.state is not ReplicaState.STALE or self.infos[name] is not info:
                # It was condemned, retired or described anew meanwhile: what was found is out of date.
                if not reason and Identity.of(self.infos[name]) == Identity.of(info):
                    if life.state is ReplicaState.STALE:
                        self._owner.pool(name).join(self.infos[name])
                    self.tell(name, life.admitted(now))
                continue
            if reason:
                if life.reason != reason:
                    log.warning("replica %s of %r is refused: %s", self.address, name, reason)
                self._refused[name] = (Identity.of(info), now + pause)
                self.tell(name, life.refused(now, reason))
            else:
                self._owner.pool(name).join(info)
                self.tell(name, life.admitted(now))

    async def _objection(self, name: str, info: pb.TeacherInfo) -> tuple[str, float]:
        """Why a replica must stay out ("" when it may serve), and for how many seconds not to ask again."""
        if info.state not in _READY:
            return f"its state is {pb.TeacherState.Name(info.state).removeprefix('TEACHER_STATE_').lower()}", 0.0
        health, pool = self._owner.settings.health, self._owner.pool(name)
        try:
            identity = pool.choose({self.address: info}, self._owner.settings.expected_weights.get(name, ""))
            difference = Identity.of(info).differences(identity)
            if difference:
                return f"it has {difference} in its pool", _RECHECK_SECONDS
            vector = await self.probe(info, max(10.0, health.probe_timeout_seconds))
        except OpdError as error:
            return f"its self-test failed: {error}", health.cool_off_seconds
        if vector is None:
            return "", 0.0
        gap = self.agreement[name] = distance(vector, pool.settle_reference([vector]))
        if gap > health.agreement_nats:
            tolerance = f"more than the tolerance of {health.agreement_nats:.3g}"
            return f"it disagrees with its pool by up to {gap:.3g} nats on the probe, {tolerance}", _RECHECK_SECONDS
        return "", 0.0

    async def probe(self, info: pb.TeacherInfo, timeout: float) -> NDArray[np.float32] | None:
        """[T] log-probs of the probe in nats from this replica; None when it serves nothing comparable."""
        spec = probe_spec(info)
        if spec is None:
            return None
        item = probe_item(info, self._owner.settings.health.probe_tokens)
        call = ScoreCall(f"probe-{self._owner.now():.6f}", info, [item], spec, 1.0, info.weights_hash)
        async with aclosing(self.link.score(call, timeout, timeout)) as answers:
            async for _, scores in answers:
                return probe_vector(scores)
        raise CorruptPayloadError(f"replica {self.address} sent no answer to the probe.")
