"""The heart of the fleet, on one asyncio loop: who is a member, what they must agree on, and the status of it all.

`TeacherFleet` runs it in a thread of its own; the simulator runs it on a loop with virtual time.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from opd.errors import AuthError, OpdError, TeacherNotFoundError, UnavailableError
from opd.fleet.dispatch import Cargo, Dispatcher
from opd.fleet.membership.agreement import AgreementReport, Identity, distance
from opd.fleet.membership.discovery import Places, Source, merge, resolve_all
from opd.fleet.membership.life_cycle import ReplicaState, Transition
from opd.fleet.membership.link import LinkFactory
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import Server
from opd.fleet.scheduling.in_flight import Job
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetStatus
from opd.fleet.status.snapshot import take_status
from opd.wire.bounds import check_items
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")

_SETTLE_SECONDS = 5.0
_ANY = "any"


class FleetCore:
    """Membership and the dispatcher. Every method must be called on its loop.

    Args:
        sources: where the servers are.
        link: makes the connection to an address.
        settings: of the fleet.
        client: name for fair queueing and request ids.

    Attributes:
        servers: by address.
        pools: by teacher.
        dispatcher: rows and calls.
    """

    def __init__(self, sources: Sequence[Source], link: LinkFactory, settings: FleetSettings, client: str) -> None:
        self.settings = settings
        self.servers: dict[str, Server] = {}
        self.pools: dict[str, Pool] = {}
        self.dispatcher = Dispatcher(settings, self.now, self.servers, self.pools, client)
        self._sources = list(sources)
        self._link = link
        self._found: dict[Source, Places] = {}
        self._places: Places = {}
        self._numbers = itertools.count()
        self._news = asyncio.Event()
        self._elected = False
        self._discovery: asyncio.Task[None] | None = None
        self._leavers: set[asyncio.Task[None]] = set()

    # What servers need of their owner.

    def now(self) -> float:
        """Seconds of the loop's clock."""
        return asyncio.get_running_loop().time()

    def pool(self, teacher: str) -> Pool:
        """The pool of a teacher, made when it is new."""
        if teacher not in self.pools:
            self.pools[teacher] = Pool(teacher, down_since=self.now())
        return self.pools[teacher]

    def wants(self, teacher: str, address: str) -> bool:
        """Whether a teacher may be used at an address."""
        allowed = self._places.get(address)
        return allowed is None or teacher in allowed

    def moved(self, server: Server, teacher: str, change: Transition) -> None:
        """A replica changed its state: who may be asked changes, and maybe whether anybody can."""
        self.dispatcher.scheduler.serve(server.lane, server.usable())
        pool = self.pool(teacher)
        if change.after is ReplicaState.CONDEMNED:
            self.dispatcher.counters.condemned += 1
            self.dispatcher.lost(server, teacher, change.reason)
        if self.dispatcher.scheduler.serving(teacher):
            pool.down_since = None
            if pool.bounds is not None:
                self.dispatcher.scheduler.limit(teacher, pool.bounds.max_sequences, pool.bounds.max_request_tokens)
        elif pool.down_since is None:
            pool.down_since = self.now()
        self._news.set()
        self.dispatcher.stir()

    def looked(self, server: Server) -> None:
        """A server was asked for the first time."""
        self._news.set()

    # Membership.

    async def connect(self) -> None:
        """Find the servers, elect the pools, wait for the first replica of every teacher asked for.

        Raises:
            UnavailableError, AuthError: no server answered in time; names them and why.
            IncompatibleTeacherError: replicas differ and nobody has a majority.
            TeacherNotFoundError: a teacher asked for by name is served nowhere.
        """
        await self._discover(first=True)
        self._discovery = asyncio.create_task(self._keep_discovering(), name="fleet discovery")
        start = self.now()
        answered_at: float | None = None
        while True:
            now = self.now()
            if answered_at is None and any(server.instance for server in self.servers.values()):
                answered_at = now
            everybody = bool(self.servers) and all(server.looked for server in self.servers.values())
            settled = answered_at is not None and now - answered_at >= _SETTLE_SECONDS
            if not self._elected and answered_at is not None and (everybody or settled):
                await self._elect()
            if self._elected and not self._missing():
                return
            refused = everybody and all(isinstance(server.error, AuthError) for server in self.servers.values())
            if refused or now - start >= self.settings.connect_seconds:
                raise self._why_not_connected()
            await self._wait_for_news(0.5)

    async def _elect(self) -> None:
        """Decide what each pool is and computes, from everybody who has answered, and open the gates."""
        names = sorted({name for server in self.servers.values() for name in server.infos})
        members: list[tuple[Pool, Server]] = []
        for name in names:
            seen = {address: server.infos[name] for address, server in self.servers.items() if name in server.infos}
            pool = self.pool(name)
            identity = pool.choose(seen, self.settings.expected_weights.get(name, ""))
            agreed = [address for address, info in seen.items() if Identity.of(info) == identity]
            members += [(pool, self.servers[address]) for address in agreed if len(agreed) > 1]
        await self._settle_references(members)
        self._elected = True
        for server in self.servers.values():
            server.gated.set()
            server.wake()

    async def _settle_references(self, members: list[tuple[Pool, Server]]) -> None:
        """Let the replicas of a teacher vote on the probe; of two that disagree, the one listed first is right."""
        asked = {
            asyncio.create_task(server.probe(server.infos[pool.name], _SETTLE_SECONDS)): pool
            for pool, server in members
        }
        if not asked:
            return
        done, late = await asyncio.wait(asked, timeout=_SETTLE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        vectors: dict[str, list[NDArray[np.float32]]] = {}
        for task in (task for task in asked if task in done):
            vector = None if task.exception() is not None else task.result()
            if vector is not None:
                vectors.setdefault(asked[task].name, []).append(vector)
        for name, found in vectors.items():
            self.pools[name].settle_reference(found)

    def _missing(self) -> list[str]:
        """Teachers that must have a replica before connect returns and have none."""
        asked = {name for source in self._sources for name in source.teachers or ()}
        names = asked or set(self.pools)
        return sorted(name for name in names if not self.dispatcher.scheduler.serving(name)) or (
            [] if names else [_ANY]
        )

    def _why_not_connected(self) -> OpdError:
        errors = [server.error for server in self.servers.values() if server.error is not None]
        silent = {address: str(server.error) for address, server in self.servers.items() if server.error is not None}
        if not self.servers:
            listed = ", ".join(source.text for source in self._sources)
            return UnavailableError(f"no teacher server is listed at {listed}; check the file or the name.")
        if len(silent) == len(self.servers):
            if all(isinstance(error, AuthError) for error in errors):
                return AuthError(f"no teacher server accepts this client: {' '.join(silent.values())}")
            return UnavailableError(
                f"no teacher server answers: {' '.join(silent.values())} Start one or fix the address."
            )
        served = sorted({name for server in self.servers.values() for name in server.infos})
        missing = self._missing()
        if missing == [_ANY]:
            return TeacherNotFoundError(
                f"{', '.join(self.servers)} answered, but no teacher there may be used; load one, or check the names "
                "behind the addresses."
            )
        absent = [name for name in missing if name not in served]
        if absent:
            return TeacherNotFoundError(
                f"teacher {absent[0]!r} is served nowhere in this fleet; it serves {', '.join(served) or 'nothing'}."
            )
        reasons = [
            f"{server.address} is {life.state}, {life.reason}"
            for server in self.servers.values()
            for name, life in server.lives.items()
            if name in missing
        ]
        return UnavailableError(f"teacher {missing[0]!r} has no usable replica: {'; '.join(reasons)}.")

    async def _wait_for_news(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    async def _keep_discovering(self) -> None:
        if all(source.text.partition(":")[0] not in ("file", "dns") for source in self._sources):
            return
        while True:
            await asyncio.sleep(self.settings.discovery_seconds)
            try:
                await self._discover(first=False)
            except Exception:
                log.exception("discovery stumbled; the known servers stay")

    async def _discover(self, *, first: bool) -> None:
        self._found = await resolve_all(self._sources, {} if first else self._found)
        self._places = merge(self._found)
        for address in self._places:
            if address not in self.servers:
                self._join(address)
        for address, server in list(self.servers.items()):
            if address not in self._places and not server.leaving:
                task = asyncio.create_task(self._leave(server), name=f"leave {address}")
                self._leavers.add(task)
                task.add_done_callback(self._leavers.discard)

    def _join(self, address: str) -> None:
        lane = self.dispatcher.scheduler.add_lane(address)
        server = self.servers[address] = Server(address, self._link(address), lane, self)
        if self._elected:
            server.gated.set()
        server.start()

    async def _leave(self, server: Server) -> None:
        """Let a server that is no longer listed finish what it has, then forget it."""
        server.leaving = True
        for name, life in server.lives.items():
            server.tell(name, life.retired(self.now(), "no longer listed"))
        while server.lane.calls and server.address not in self._places:
            await asyncio.sleep(0.1)
        await server.stop()
        self.servers.pop(server.address, None)
        self.dispatcher.scheduler.remove_lane(server.address)
        if server.address in self._places:
            self._join(server.address)

    # Rows.

    def check(self, teacher: str, items: Sequence[ScoreItem], spec: PayloadSpec, temperature: float) -> None:
        """Refuse rows that can never be scored, before anything is sent.

        Raises:
            TeacherNotFoundError, InvalidRequestError, IncompatibleTeacherError: see `opd.wire.bounds.check_items`.
        """
        bounds = self.known(teacher).bounds
        if bounds is None:
            raise UnavailableError(f"teacher {teacher!r} has no replica that was ever admitted.")
        for item in items:
            check_items([item], spec, temperature, bounds)

    def known(self, teacher: str) -> Pool:
        """The pool of a teacher that the fleet has.

        Raises:
            TeacherNotFoundError: the fleet has no such teacher.
        """
        if teacher not in self.pools:
            served = ", ".join(sorted(self.pools)) or "nothing"
            raise TeacherNotFoundError(f"there is no teacher {teacher!r} in this fleet; it serves {served}.")
        return self.pools[teacher]

    def make_job(
        self,
        teacher: str,
        item: ScoreItem,
        spec: PayloadSpec,
        temperature: float,
        group: str,
        deadline: float | None,
        deliver: Callable[[Scores | OpdError], None],
        trace: tuple[tuple[str, str], ...] = (),
    ) -> Job:
        """A row for the dispatcher; `deadline` in seconds from now, None for the settings' default."""
        now = self.now()
        seconds = self.settings.calls.row_seconds if deadline is None else deadline
        return Job(
            number=next(self._numbers),
            teacher=teacher,
            tokens=len(item.token_ids),
            batch_key=(spec, temperature),
            group=group,
            submitted=now,
            deadline=now + seconds if seconds else float("inf"),
            cargo=Cargo(item, spec, temperature, deliver, trace),
        )

    # Everything else.

    async def head(self, teacher: str, timeout: float = 600.0) -> Head:
        """The teacher's head from any usable replica, fetched once per content hash."""
        pool = self.known(teacher)
        if pool.info is None or not pool.info.head.hash:
            raise TeacherNotFoundError(f"teacher {teacher!r} does not hand out its head; ask for another payload.")
        wanted = pool.info.head.hash
        async with pool.head_lock:
            if wanted in pool.heads:
                return pool.heads[wanted]
            last: OpdError = UnavailableError(f"teacher {teacher!r} has no usable replica to fetch its head from.")
            for lane in self.dispatcher.scheduler.serving(teacher):
                try:
                    head = await self.servers[lane.key].link.head(teacher, wanted, timeout)
                except OpdError as error:
                    last = error
                    continue
                pool.heads = {wanted: head}
                return head
            raise last

    async def verify(self, teacher: str) -> AgreementReport:
        """Score the probe on every replica of a teacher, usable or not, and compare with the pool's reference."""
        pool = self.known(teacher)
        asked = [server for server in self.servers.values() if teacher in server.lives]
        results = await asyncio.gather(
            *(server.probe(server.infos[teacher], 30.0) for server in asked), return_exceptions=True
        )
        vectors: dict[str, NDArray[np.float32]] = {}
        errors: dict[str, str] = {}
        for server, result in zip(asked, results, strict=True):
            if isinstance(result, BaseException):
                errors[server.address] = str(result)
            elif result is not None:
                vectors[server.address] = result
        gaps: dict[str, float] = {}
        if vectors:
            reference = pool.reference if pool.reference is not None else next(iter(vectors.values()))
            gaps = {address: distance(vector, reference) for address, vector in vectors.items()}
        return AgreementReport(teacher, self.settings.health.agreement_nats, gaps, errors)

    def adopt(self, teacher: str) -> None:
        """Accept other weights: the next replica to be checked decides what the pool is; all are checked again."""
        pool = self.known(teacher)
        pool.adopt()
        now = self.now()
        for server in self.servers.values():
            life = server.lives.get(teacher)
            if life is not None:
                server.tell(teacher, life.doubted(now, "the pool takes other weights"))
                server.recheck(teacher)

    def infos(self) -> Mapping[str, pb.TeacherInfo]:
        """Descriptions of the teachers that have had a usable replica."""
        return {name: pool.info for name, pool in sorted(self.pools.items()) if pool.info is not None}

    def status(self) -> FleetStatus:
        """The fleet now."""
        status = take_status(self.servers, self.pools, self.dispatcher, self.now())
        return dataclasses.replace(status, counters=dataclasses.replace(self.dispatcher.counters))

    async def close(self) -> None:
        """End everything."""
        tasks = [task for task in (self._discovery, *self._leavers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.dispatcher.close()
        await asyncio.gather(*(server.stop() for server in self.servers.values()), return_exceptions=True)
