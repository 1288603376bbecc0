"""The core of the fleet, on one asyncio loop: its members, its rows, and requests that concern a whole teacher.

`TeacherFleet` runs it in a thread of its own; the simulator runs it on a loop with virtual time.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from opd.errors import OpdError, TeacherNotFoundError, UnavailableError
from opd.fleet.dispatch import Dispatcher
from opd.fleet.membership.agreement import AgreementReport, distance, medoid
from opd.fleet.membership.discovery import Source
from opd.fleet.membership.life_cycle import ReplicaState, Transition
from opd.fleet.membership.link import LinkFactory, ReplicaLink, RequestIds
from opd.fleet.membership.members import Members
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.scheduling.in_flight import ScoreTask
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetStatus
from opd.fleet.status.snapshot import take_status
from opd.fleet.weights import WeightsUpdate, adopt, update_weights
from opd.wire.bounds import check_items
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

T = TypeVar("T")


class FleetCore:
    """The members and the dispatcher. Every method must be called on its loop.

    Args:
        sources: where the servers are.
        link: makes the connection to an address.
        settings: the fleet's settings.
        client: name of this client, for fair queueing and request ids.

    Attributes:
        settings: the fleet's settings.
        members: the servers and the pools.
        monitors: the servers' monitors, by address.
        pools: the pools, by teacher.
        dispatcher: sends rows and delivers their scores.
    """

    def __init__(self, sources: Sequence[Source], link: LinkFactory, settings: FleetSettings, client: str) -> None:
        self.settings = settings
        request_id = RequestIds(client)
        self.members = Members(sources, link, settings, request_id)
        self.monitors, self.pools, self.now = self.members.monitors, self.members.pools, self.members.now
        self.dispatcher = Dispatcher(settings, self.now, self.monitors, self.pools, request_id, self.head)
        self.members.on_change = self._changed
        self.members.on_join = self.dispatcher.scheduler.add_server
        self.members.on_leave = self.dispatcher.scheduler.remove_server

    async def connect(self, *, look: bool = False) -> None:
        """Connect to all servers, and look for new ones from then on."""
        await self.members.connect(look=look)

    def _changed(self, monitor: ReplicaMonitor, teacher: str, change: Transition) -> None:
        """Act on a replica's change of state, which changes where its teacher's rows may go."""
        scheduler, pool = self.dispatcher.scheduler, self.pools[teacher]
        scheduler.serve(monitor.server, monitor.usable())
        self.dispatcher.counters.replica_deaths += change.after is ReplicaState.DEAD
        if change.after in (ReplicaState.DEAD, ReplicaState.REJECTED):
            self.dispatcher.lost(monitor, teacher, change.reason)
        if scheduler.serving(teacher) and pool.bounds is not None:
            bounds = pool.bounds
            scheduler.limit(teacher, bounds.max_sequences, bounds.max_request_tokens, bounds.max_request_bytes)
        self.dispatcher.wake()

    # Rows.

    def check(self, teacher: str, items: Sequence[ScoreItem], spec: PayloadSpec, temperature: float) -> None:
        """Refuse rows that can never be scored, before anything is sent.

        Raises:
            TeacherNotFoundError, InvalidRequestError, IncompatibleTeacherError: see `opd.wire.bounds.check_items`.
            UnavailableError: if no replica of the teacher was ever admitted.
        """
        bounds = self.known(teacher).bounds
        if bounds is None:
            raise UnavailableError(
                f"no replica of teacher {teacher!r} has passed its check yet; see `opd fleet status`."
            )
        # One by one: limits of a request do not apply, since the scheduler makes requests that fit.
        for index, item in enumerate(items):
            check_items([item], spec, temperature, bounds, first=index)

    def known(self, teacher: str) -> Pool:
        """The pool of a teacher in this fleet.

        Raises:
            TeacherNotFoundError: if the fleet has no such teacher.
        """
        if teacher not in self.pools:
            served = ", ".join(sorted(self.pools)) or "nothing"
            raise TeacherNotFoundError(f"teacher {teacher!r} is not served in this fleet; it serves {served}.")
        return self.pools[teacher]

    def make_task(
        self,
        teacher: str,
        item: ScoreItem,
        spec: PayloadSpec,
        temperature: float,
        group: str,
        deadline: float | None,
        deliver: Callable[[Scores | OpdError], None],
        trace: tuple[tuple[str, str], ...] = (),
    ) -> ScoreTask:
        """A row for the dispatcher. `deadline` is in seconds from now, 0 for none; None takes the settings' default."""
        now = self.now()
        # 0 means no deadline, in the settings and as an argument.
        seconds = self.settings.calls.row_seconds if deadline is None else deadline
        return ScoreTask(
            number=next(self.dispatcher.numbers),
            teacher=teacher,
            item=item,
            spec=spec,
            temperature=temperature,
            deliver=deliver,
            group=group,
            submitted=now,
            deadline=now + seconds if seconds else float("inf"),
            trace=trace,
        )

    # Everything else.

    def head_here(self, teacher: str) -> Head | None:
        """The teacher's head if it has been fetched, else None; may be called from any thread."""
        pool = self.known(teacher)
        return None if pool.info is None else pool.heads.get(pool.info.head.hash)

    async def head(self, teacher: str, timeout: float = 600.0) -> Head:
        """The teacher's head from any usable replica, fetched once per content hash.

        Raises:
            TeacherNotFoundError: if there is no such teacher, or it does not serve its head.
            OpdError: from the last replica that was asked.
        """
        pool = self.known(teacher)
        if pool.info is None or not pool.info.head.hash:
            raise TeacherNotFoundError(f"teacher {teacher!r} does not serve its output head; ask for another payload.")
        wanted = pool.info.head.hash
        async with pool.head_lock:  # a head is hundreds of megabytes, so concurrent callers share one transfer
            if wanted not in pool.heads:
                pool.heads = {wanted: await self._from_any(teacher, lambda link: link.head(teacher, wanted, timeout))}
            return pool.heads[wanted]

    async def tokens(self, teacher: str, start: int, timeout: float = 60.0) -> Sequence[bytes]:
        """Some of the teacher's tokens, from id `start` on; see `ReplicaLink.tokens`.

        Raises:
            TeacherNotFoundError: if there is no such teacher.
            OpdError: from the last replica that was asked.
        """
        self.known(teacher)
        return await self._from_any(teacher, lambda link: link.tokens(teacher, start, timeout))

    async def tokenizer(self, teacher: str, timeout: float = 60.0) -> bytes:
        """What the teacher's tokenizer is made of; see `ReplicaLink.tokenizer`. Errors are those of `tokens`."""
        info = self.known(teacher).info
        wanted = "" if info is None else info.tokenizer.fingerprint
        return await self._from_any(teacher, lambda link: link.tokenizer(teacher, wanted, timeout))

    async def _from_any(self, teacher: str, ask: Callable[[ReplicaLink], Awaitable[T]]) -> T:
        """The answer of the first usable replica that gives one."""
        last: OpdError = UnavailableError(f"teacher {teacher!r} has no usable replica to ask.")
        for monitor in self.members.usable(teacher):
            try:
                return await ask(monitor.link)
            except OpdError as error:
                last = error
        raise last

    async def verify(self, teacher: str) -> AgreementReport:
        """Score one row on every replica of a teacher, and compare each result with those of the usable replicas."""
        self.known(teacher)
        # Including replicas that are out of service: showing how far off they are is what this is for.
        asked = [monitor for monitor in self.monitors.values() if teacher in monitor.lives]
        if not asked:
            return AgreementReport(teacher, self.settings.health.agreement_nats, {}, {})
        row = self.members.check_rows.draw(asked[0].infos[teacher])
        results = await asyncio.gather(
            *(monitor.admission.score_row(monitor.infos[teacher], row, 30.0) for monitor in asked),
            return_exceptions=True,
        )
        vectors: dict[str, NDArray[np.float32]] = {}
        errors: dict[str, str] = {}
        for monitor, result in zip(asked, results, strict=True):
            if isinstance(result, BaseException):
                errors[monitor.address] = str(result)
            elif result is not None:
                vectors[monitor.address] = result
        gaps: dict[str, float] = {}
        if vectors:
            # Only replicas in service set the reference: a replica out of service must not define what is right.
            voters = [one.address for one in self.members.usable(teacher) if one.address in vectors] or list(vectors)
            reference = vectors[voters[medoid([vectors[address] for address in voters])]]
            gaps = {address: distance(vector, reference) for address, vector in vectors.items()}
        return AgreementReport(teacher, self.settings.health.agreement_nats, gaps, errors)

    def adopt(self, teacher: str, weights_hash: str = "") -> None:
        """Accept other weights of a teacher, as `ScoreSource.adopt` describes."""
        self.known(teacher)
        adopt(self.members, teacher, weights_hash)

    async def update_weights(self, teacher: str, folder: str, timeout: float) -> WeightsUpdate:
        """Replace the weights of a teacher on all its servers, as `ScoreSource.update_weights` describes."""
        self.known(teacher)
        return await update_weights(self.members, teacher, folder, timeout)

    def infos(self) -> Mapping[str, pb.TeacherInfo]:
        """Descriptions of all teachers that have had a usable replica."""
        return {name: pool.info for name, pool in sorted(self.pools.items()) if pool.info is not None}

    def status(self) -> FleetStatus:
        """A snapshot of the fleet."""
        status = take_status(self.monitors, self.pools, self.dispatcher, self.now())
        return dataclasses.replace(status, counters=dataclasses.replace(self.dispatcher.counters))

    async def close(self) -> None:
        """End everything: the dispatcher, then the members."""
        await self.dispatcher.close()
        await self.members.close()
