"""The check before a replica gets rows: is it the teacher that its pool is, and does it compute the same?"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, IncompatibleTeacherError, OpdError
from opd.fleet.membership.agreement import CheckRows, comparable_payload, distance, sampled_log_probs
from opd.fleet.membership.identity import Identity
from opd.fleet.membership.life_cycle import OUTSIDE, ReplicaLife, ReplicaState, Transition
from opd.fleet.membership.link import ReplicaLink, ReplicaRequest
from opd.fleet.membership.pool import Pool
from opd.fleet.settings import FleetSettings
from opd.wire.types import ScoreItem
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")

_RECHECK_SECONDS = 10.0
_READY = (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)


class CheckedServer(Protocol):
    """What checks use of a server's monitor (`ReplicaMonitor`)."""

    address: str
    link: ReplicaLink
    lives: dict[str, ReplicaLife]
    infos: dict[str, pb.TeacherInfo]
    instance: str
    agreement: dict[str, float]
    admission: "Admission"

    def ping_soon(self) -> None:
        """Ping now."""

    def apply(self, teacher: str, change: Transition | None) -> None:
        """Announce a transition in a replica's life cycle, if any."""


class Peers(Protocol):
    """What checks use of the fleet (`Members`)."""

    settings: FleetSettings
    check_rows: CheckRows

    def now(self) -> float:
        """Seconds of the loop's clock."""

    def request_id(self) -> str:
        """An id for a request for scores."""

    def pool(self, teacher: str) -> Pool:
        """The pool of a teacher."""

    def usable(self, teacher: str) -> Sequence[CheckedServer]:
        """The servers whose replica of a teacher may get rows."""


class _Rejection(NamedTuple):
    """An identity that was rejected or not checkable, until when on the fleet's clock, and why if it was rejected."""

    identity: Identity
    until: float
    reason: str


class _Finding(NamedTuple):
    """The result of a check: why it is rejected, or why it could not be checked, and seconds until the next try."""

    rejected: str = ""
    postponed: str = ""
    pause: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it may not be admitted now."""
        return bool(self.rejected or self.postponed)


class _Disagreement(Exception):
    """The replica does not agree with its pool; the message says how."""


class _OutOfDate(Exception):
    """The pool got other weights during the check, which therefore says nothing about them."""


class Admission:
    """Checks the replicas of one server, in a task of its own, so that a slow check does not hold up the pings.

    Args:
        monitor: the server's monitor.
        owner: the fleet.
    """

    def __init__(self, monitor: CheckedServer, owner: Peers) -> None:
        self._monitor = monitor
        self._owner = owner
        self._open = False
        self._rejections: dict[str, _Rejection] = {}
        self._outdated: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Allow replicas to be admitted from now on: the fleet knows what its pools are."""
        self._open = True
        self._monitor.ping_soon()

    def forget(self) -> None:
        """Forget rejections, so that replicas are checked again: another process answers."""
        self._rejections.clear()

    def reject(self, teacher: str, reason: str) -> bool:
        """Take a replica out of service until it changes, because its scores of the run's own rows cannot be trusted.

        Returns:
            Whether it was in service, and this is therefore news.
        """
        life, info = self._monitor.lives.get(teacher), self._monitor.infos.get(teacher)
        if life is None or info is None or life.state in (*OUTSIDE, ReplicaState.RETIRED):
            return False
        self._rejections[teacher] = _Rejection(Identity.of(info), float("inf"), reason)
        self._monitor.agreement.pop(teacher, None)  # it was measured on another row, and is not measured again
        self._monitor.apply(teacher, life.rejected(self._owner.now(), reason))
        return True

    def recheck(self, teacher: str) -> None:
        """Check a replica again, by a description that is requested from now on: its pool may have other weights."""
        self._rejections.pop(teacher, None)
        self._outdated[teacher] = self._owner.now()
        self._monitor.ping_soon()

    def described(self, asked: float) -> None:
        """Note that the server has described its replicas; `asked` is when it was asked to, on the fleet's clock."""
        self._outdated = {name: since for name, since in self._outdated.items() if asked < since}

    def start(self) -> None:
        """Start checking the replicas that need it, unless a check is in progress."""
        if self._open and (self._task is None or self._task.done()):
            outside = [name for name, life in self._monitor.lives.items() if life.state in OUTSIDE]
            # With an outdated description, a replica would turn its pool into what the replica was then.
            if names := [name for name in outside if name not in self._outdated]:
                self._task = asyncio.create_task(self._check_all(names), name=f"admission {self._monitor.address}")

    @property
    def settled(self) -> bool:
        """Whether every replica here has been checked since it was last found, with whatever result."""
        unverified = (name for name, life in self._monitor.lives.items() if life.state is ReplicaState.UNVERIFIED)
        return self._open and all(name in self._rejections for name in unverified)

    async def stop(self) -> None:
        """Cancel the check in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @staticmethod
    def ready(info: pb.TeacherInfo) -> bool:
        """Whether a teacher's server says that it can serve the teacher."""
        return info.state in _READY

    async def _check_all(self, names: list[str]) -> None:
        for name in names:
            info = self._monitor.infos[name]
            before = self._rejections.get(name)
            if before is None or before.identity != Identity.of(info) or self._owner.now() >= before.until:
                await self._check(name, info)
            elif before.reason:
                life = self._monitor.lives[name]
                self._monitor.apply(name, life.rejected(self._owner.now(), before.reason))

    async def _check(self, name: str, info: pb.TeacherInfo) -> None:
        monitor, life, identity = self._monitor, self._monitor.lives[name], Identity.of(info)
        pool = self._owner.pool(name)
        era, instance = pool.era, monitor.instance
        found = await self._find(name, info, era)
        # The check took at least a round trip. Anything may have changed meanwhile, which makes its result void.
        if pool.era != era or monitor.instance != instance:
            monitor.ping_soon()
            return
        now = self._owner.now()
        if life.state not in OUTSIDE or Identity.of(monitor.infos[name]) != identity:
            return  # it died, retired or got other weights meanwhile
        if found.postponed and monitor.infos[name] is not info:
            return  # described anew since the check failed, so it is checked again, without a pause
        if found.bad:
            self._rejections[name] = _Rejection(identity, now + found.pause, found.rejected)
        if found.rejected:
            monitor.apply(name, life.rejected(now, found.rejected))
        elif found.postponed:
            if life.reason != found.postponed:
                log.warning("replica %s of %r is not used: %s", monitor.address, name, found.postponed)
            monitor.apply(name, life.postponed(now, found.postponed))
        else:
            pool.join(monitor.infos[name])
            monitor.apply(name, life.admitted(now))

    async def _find(self, name: str, info: pb.TeacherInfo, era: int) -> _Finding:
        """Check a replica. Every outcome, including a failed check, is a finding and not an exception."""
        self._monitor.agreement.pop(name, None)  # it belongs to the previous process or weights
        if not self.ready(info):
            state = pb.TeacherState.Name(info.state).removeprefix("TEACHER_STATE_").lower()
            return _Finding(postponed="it is still loading" if state == "loading" else f"its state is {state}")
        try:
            await self._compare(name, info, era)
        except _Disagreement as found:
            return _Finding(rejected=str(found), pause=_RECHECK_SECONDS)
        except OpdError as error:
            pause = self._owner.settings.health.cool_off_seconds
            return _Finding(postponed=f"its check failed: {error}", pause=pause)
        except _OutOfDate:
            pass  # the caller recognises this by the pool's era
        except Exception as error:
            log.exception("checking replica %s failed with an unexpected error, a bug", self._monitor.address)
            pause = self._owner.settings.health.cool_off_seconds
            return _Finding(postponed=f"its check failed: {error!r}", pause=pause)
        return _Finding()

    async def _compare(self, name: str, info: pb.TeacherInfo, era: int) -> None:
        """Compare a replica with what its pool is in this era.

        Raises:
            _Disagreement: if it is something else, or computes something else.
            _OutOfDate: if the pool got other weights meanwhile.
            OpdError: if it could not be compared.
        """
        settings, pool = self._owner.settings, self._owner.pool(name)
        identity = pool.choose({self._monitor.address: info}, settings.expected_weights.get(name, ""))
        difference = Identity.of(info).differences(identity)
        if difference:
            raise _Disagreement(f"it has {difference} in the rest of its pool")
        spec = comparable_payload(info)
        if spec is None:
            return
        gap = self._monitor.agreement[name] = await self._gap(info, pool, era)
        if gap > settings.health.agreement_nats:
            tolerance = f"more than health.agreement_nats, {settings.health.agreement_nats:.3g}"
            raise _Disagreement(f"it disagrees with its pool by up to {gap:.3g} nats on one row, {tolerance}")

    async def _gap(self, info: pb.TeacherInfo, pool: Pool, era: int) -> float:
        """Largest |dlogp| in nats to a replica in service on a row drawn now, or to the reference where there is none.

        A server could recognise a row that it was asked before and answer it specially, so only a replica without a
        peer is asked the reference row again.
        """
        timeout = max(10.0, self._owner.settings.health.ping_timeout_seconds)
        peers = [one for one in self._owner.usable(info.name) if one is not self._monitor]
        if peers:
            row = self._owner.check_rows.draw(info)
            asked = (self.score_row(info, row, timeout), peers[0].admission.score_row(info, row, timeout))
            mine, theirs = await asyncio.gather(*asked, return_exceptions=True)
            if isinstance(mine, BaseException):
                raise mine
            if not isinstance(theirs, BaseException):
                return distance(mine, theirs)
            # The peer failed, which says nothing about this replica: compare with the reference instead.
        while True:
            row = self._owner.check_rows.draw(info) if pool.reference is None else pool.reference.row
            vector = await self.score_row(info, row, timeout)
            if pool.era != era:
                raise _OutOfDate
            reference = pool.settle_reference(row, [vector])
            if reference.row is row:
                return distance(vector, reference.log_probs)
            # A replica that was checked at the same time set the reference first: compare on its row.

    async def score_row(self, info: pb.TeacherInfo, row: ScoreItem, timeout: float) -> NDArray[np.float32]:
        """[T] log-probs of a check row's response tokens from this server, nats; `timeout` in seconds.

        Raises:
            OpdError: it did not answer, or its teacher serves nothing comparable.
        """
        spec = comparable_payload(info)
        if spec is None:
            raise IncompatibleTeacherError(
                f"teacher {info.name!r} serves no payload with log-probs, so its replicas cannot be compared."
            )
        request = ReplicaRequest(self._owner.request_id(), info, [row], spec, 1.0, info.weights_hash, check=True)
        async with aclosing(self._monitor.link.score(request, timeout, timeout)) as answers:
            async for _, scores in answers:
                return sampled_log_probs(scores)
        raise CorruptPayloadError(f"replica {self._monitor.address} sent no scores for the check row.")
