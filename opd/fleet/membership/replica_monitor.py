"""Monitors one server: pings, restarts, draining. Its replicas are checked by `admission` before they serve.

There is one task per server. It calls `GetLoad` while all is well and `Describe` while a replica is out of service, and
reports what it learns to the replicas' life cycles. It decides nothing about rows; the core does, when a life cycle
changes.
"""

import asyncio
import logging
from typing import Protocol

from opd.errors import CorruptPayloadError, OpdError
from opd.fleet.membership.admission import Admission, Peers
from opd.fleet.membership.life_cycle import OUTSIDE, ReplicaLife, ReplicaState, Transition
from opd.fleet.membership.link import Description, ReplicaLink
from opd.fleet.scheduling.in_flight import ServerLoad
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")

_RETRY_PAUSE = 0.2


class Owner(Peers, Protocol):
    """What monitors use of the fleet (`Members`)."""

    def wants(self, teacher: str, address: str) -> bool:
        """Whether a teacher may be used at an address."""

    def changed(self, monitor: "ReplicaMonitor", teacher: str, change: Transition) -> None:
        """Take note of a replica's change of state."""

    def contacted(self) -> None:
        """Take note that a server was asked for the first time."""


class ReplicaMonitor:
    """One server of the fleet, and its replicas.

    Attributes:
        address: address of the server.
        link: the connection to it.
        server: what is in flight there.
        lives: the health of its replicas, by teacher.
        infos: its last descriptions, by teacher.
        instance: random id of its process; "" before the first answer.
        version: version of its software.
        load: its last load report.
        agreement: by teacher, the largest difference from the pool at the last check, in nats.
        error: why it did not answer the last time; None if it did.
        contacted: whether it has been asked at least once.
        leaving: whether it is no longer listed.
        admission: checks its replicas; opened once the fleet has elected its pools.
    """

    def __init__(self, address: str, link: ReplicaLink, server: ServerLoad, owner: Owner) -> None:
        self.address = address
        self.link = link
        self.server = server
        self.lives: dict[str, ReplicaLife] = {}
        self.infos: dict[str, pb.TeacherInfo] = {}
        self.instance = ""
        self.version = ""
        self.load: pb.GetLoadResponse | None = None
        self.agreement: dict[str, float] = {}
        self.error: OpdError | None = None
        self.contacted = False
        self.leaving = False
        self.admission = Admission(self, owner)
        self._described: set[str] = set()
        self._owner = owner
        self._ping_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start pinging."""
        self._task = asyncio.create_task(self._run(), name=f"monitor {self.address}")

    async def stop(self) -> None:
        """Stop pings and checks, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.admission.stop()
        await self.link.close()

    def ping_soon(self) -> None:
        """Ping now, because something about the server looks wrong."""
        self._ping_now.set()

    def apply(self, teacher: str, change: Transition | None) -> None:
        """Announce the transition that an event caused in a replica's life cycle, if any."""
        if change is None:
            return
        passing = change.after in (ReplicaState.HEALTHY, ReplicaState.SUSPECT)
        if not passing and change.after is not ReplicaState.REJECTED:
            self.agreement.pop(teacher, None)  # of a replica that has died or is to be checked again
        level = logging.INFO if passing else logging.WARNING
        where = f"{self.address} of {teacher!r}"
        log.log(level, "replica %s: %s -> %s, %s", where, change.before, change.after, change.reason)
        self._owner.changed(self, teacher, change)

    def usable(self) -> list[str]:
        """Teachers whose replica here may get rows."""
        return [name for name, life in self.lives.items() if life.usable]

    @property
    def loading(self) -> list[str]:
        """Teachers that the server says it is loading; empty if it does not answer."""
        if self.error is not None or self.load is None:
            return []
        found = {one.teacher for one in self.load.teachers if one.state == pb.TEACHER_STATE_LOADING}
        return sorted(found | {name for name in self._described if self.infos[name].state == pb.TEACHER_STATE_LOADING})

    async def _run(self) -> None:
        while True:
            try:
                await self._ping()
            except asyncio.CancelledError:
                raise
            except OpdError as error:
                self._unanswered(error)
            except Exception as error:
                log.exception("monitoring replica %s failed with an unexpected error, a bug", self.address)
                self._unanswered(CorruptPayloadError(f"replica {self.address} could not be monitored: {error!r}."))
            if not self.contacted:
                self.contacted = True
                self._owner.contacted()
            await self._pause()

    def _unanswered(self, error: OpdError) -> None:
        self.error = error
        now = self._owner.now()
        for name, life in list(self.lives.items()):
            self.apply(name, life.ping_failed(now, str(error)))

    async def _pause(self) -> None:
        """Wait until the next ping: briefly if a replica's state is in doubt, longer while all is well."""
        health = self._owner.settings.health
        states = {life.state for life in self.lives.values()}
        if ReplicaState.SUSPECT in states and self.error is not None:
            seconds = _RETRY_PAUSE  # rows in flight wait for the verdict
        elif self.error is not None or states & {ReplicaState.DEAD, *OUTSIDE} or not states:
            seconds = health.revive_seconds
        else:
            seconds = health.ping_seconds
        # A broken channel backs off, and until then fails every call with its last error; a new one connects at once. A
        # suspect keeps its channel, since closing it would fail RPCs that may still finish.
        if self.error is not None and ReplicaState.SUSPECT not in states:
            await self.link.reconnect()
        try:
            async with asyncio.timeout(seconds):
                await self._ping_now.wait()
        except TimeoutError:
            pass
        self._ping_now.clear()

    async def _ping(self) -> None:
        timeout = self._owner.settings.health.ping_timeout_seconds
        states = {life.state for life in self.lives.values()}
        # GetLoad is cheap and reveals a new process; only replicas that are out of service need a description.
        if not self.instance or not states or states - {ReplicaState.HEALTHY, ReplicaState.SUSPECT}:
            await self._describe(timeout)
        try:
            self.load = await self.link.load(timeout)
        except OpdError:
            self.load = None
            raise
        if self.load.instance_id != self.instance:  # restarted between two pings, or between the two calls above
            await self._describe(timeout)
        self.error = None
        now = self._owner.now()
        self._see_missing(self.load, now)
        loads = {entry.teacher: entry.state for entry in self.load.teachers}
        for name, life in list(self.lives.items()):
            # A teacher that is missing from the report is judged by its description only.
            if loads.get(name, pb.TEACHER_STATE_READY) == pb.TEACHER_STATE_DRAINING:
                self.apply(name, life.retired(now, "draining"))
            else:
                self.apply(name, life.ping_answered(now))
        if not self.leaving:
            self.admission.start()

    async def _describe(self, timeout: float) -> None:
        asked = self._owner.now()
        found = await self.link.describe(timeout)
        now = self._owner.now()
        self.admission.described(asked)
        if self.instance and found.instance_id != self.instance:
            # What is known about the old process (speed, pauses, rejections, failures) does not hold for the new one.
            self.server.restarted()
            self.admission.forget()
            for name, life in list(self.lives.items()):
                self.apply(name, life.restarted(now))
        self.instance, self.version = found.instance_id, found.server_version
        self._take(found, now)

    def _take(self, found: Description, now: float) -> None:
        wanted = {name: info for name, info in found.teachers.items() if self._owner.wants(name, self.address)}
        for name, info in wanted.items():
            life = self.lives.setdefault(name, ReplicaLife(self._owner.settings.health, now))
            # A replica that is seen for the first time has no earlier weights to compare with.
            known = self.infos.get(name, info)
            self.infos[name] = info
            if known.weights_hash != info.weights_hash:
                self.apply(name, life.identity_changed(now, "its weights were replaced"))
            elif life.state is ReplicaState.RETIRED and self.admission.ready(info) and not self.leaving:
                self.apply(name, life.identity_changed(now, "serves again, to be checked"))
        self._described = set(wanted)

    def _see_missing(self, load: pb.GetLoadResponse, now: float) -> None:
        """Judge the replicas that the last description leaves out, as it does until they are loaded."""
        states = {entry.teacher: entry.state for entry in load.teachers}
        # A server loads its teachers one after the other and lists each when its turn comes; before the first, it lists
        # none. A teacher that was loaded after the description is in the next description.
        loading = bool(self.loading) or not (states or self._described)
        for name in set(self.lives) - self._described:
            life = self.lives[name]
            waits = loading or states.get(name) in (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)
            if life.state in (ReplicaState.UNVERIFIED, ReplicaState.DEAD) and waits:
                # What is known of it came from the previous process; in this state it is neither checked nor given up.
                self.infos[name].state = pb.TEACHER_STATE_LOADING
            elif states.get(name) == pb.TEACHER_STATE_FAILED:
                self.apply(name, life.retired(now, "it has failed, see the log of its server"))
            else:
                self.apply(name, life.retired(now, "no longer served here"))
