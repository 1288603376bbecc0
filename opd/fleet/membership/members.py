"""The servers of the fleet: finds them, monitors them, and decides what the replicas of a teacher must be."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from opd.errors import AuthError, IncompatibleTeacherError, OpdError, TeacherNotFoundError, UnavailableError
from opd.fleet.membership.agreement import CheckRows
from opd.fleet.membership.discovery import Places, Source, merge, resolve_all
from opd.fleet.membership.identity import Identity
from opd.fleet.membership.life_cycle import Transition
from opd.fleet.membership.link import LinkFactory
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.scheduling.in_flight import ServerLoad
from opd.fleet.settings import FleetSettings

log = logging.getLogger("opd.fleet")

_SETTLE_SECONDS = 5.0
"""Seconds that the election waits for the other servers once one has answered."""
_SILENT_SECONDS = 2.0
"""Seconds after which connect logs what it is waiting for."""
_ANY = "any"
"""In the list of missing teachers, stands for any teacher at all."""


class Members:
    """The servers and the pools. Every method must be called on the fleet's loop.

    Args:
        sources: where the servers are.
        link: makes the connection to an address.
        settings: the fleet's settings.
        request_id: returns an id for each request for scores.

    Attributes:
        settings, request_id: as given.
        monitors: the servers' monitors, by address.
        pools: the pools, by teacher.
        check_rows: draws the rows on which replicas are compared.
        on_change: called with (monitor, teacher, change) when a replica has changed its state.
        on_join: called with the address of a new server; returns its `ServerLoad`.
        on_leave: called with the address of a server that has left.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        link: LinkFactory,
        settings: FleetSettings,
        request_id: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.request_id = request_id
        self.monitors: dict[str, ReplicaMonitor] = {}
        self.pools: dict[str, Pool] = {}
        self.check_rows = CheckRows(settings.health.agreement_tokens, settings.health.check_seed)
        self.on_change: Callable[[ReplicaMonitor, str, Transition], None]
        self.on_join: Callable[[str], ServerLoad]
        self.on_leave: Callable[[str], None]
        self._sources = list(sources)
        self._link = link
        self._found: dict[Source, Places] = {}
        self._places: Places = {}
        self._news = asyncio.Event()
        self._elected = False
        self._look = False
        self._discovery: asyncio.Task[None] | None = None
        self._leavers: set[asyncio.Task[None]] = set()

    # The interface for monitors, `Owner`.

    def now(self) -> float:
        """Seconds of the loop's clock."""
        return asyncio.get_running_loop().time()

    def pool(self, teacher: str) -> Pool:
        """The pool of a teacher, created if it is new."""
        if teacher not in self.pools:
            self.pools[teacher] = Pool(teacher, down_since=self.now())
        return self.pools[teacher]

    def wants(self, teacher: str, address: str) -> bool:
        """Whether a teacher may be used at an address."""
        allowed = self._places.get(address)
        return allowed is None or teacher in allowed

    def changed(self, monitor: ReplicaMonitor, teacher: str, change: Transition) -> None:
        """Take note of a replica's change of state."""
        pool = self.pool(teacher)
        if any(self._usable(teacher)):
            pool.down_since = None
        elif pool.down_since is None:
            pool.down_since = self.now()
        self.on_change(monitor, teacher, change)
        self._news.set()

    def contacted(self) -> None:
        """Take note that a server was asked for the first time."""
        self._news.set()

    def usable(self, teacher: str) -> list[ReplicaMonitor]:
        """The servers whose replica of a teacher may get rows, in the order of the list."""
        return list(self._usable(teacher))

    def _usable(self, teacher: str) -> Iterator[ReplicaMonitor]:
        lives = ((monitor, monitor.lives.get(teacher)) for monitor in self.monitors.values())
        return (monitor for monitor, life in lives if life is not None and life.usable)

    # Connecting.

    async def connect(self, *, look: bool = False) -> None:
        """Find the servers, elect the pools, and wait for the first replica of every teacher that was named.

        Args:
            look: only to see what there is: neither teachers without a usable replica nor silent servers are an error.

        Raises:
            UnavailableError, AuthError: if no server answered in time; the message names them and the reasons.
            IncompatibleTeacherError: if no replica of a teacher has the expected weights.
            UndecidedTeacherError: if the replicas of a teacher differ and no side has a majority.
            TeacherNotFoundError: if a named teacher is not served anywhere.
        """
        self._look = look
        await self._discover(first=True)
        self._discovery = asyncio.create_task(self._keep_discovering(), name="fleet discovery")
        start = self.now()
        answered_at: float | None = None
        said = ""
        while True:
            now = self.now()
            if now - start >= _SILENT_SECONDS and (awaited := ", ".join(self._awaited())) != said:
                said = awaited
                log.warning("waiting for %s, up to %g s", awaited, self.settings.connect_seconds)
            if answered_at is None and any(monitor.instance for monitor in self.monitors.values()):
                answered_at = now
            asked = all(monitor.contacted for monitor in self.monitors.values())
            everybody = bool(self.monitors) and asked
            settled = answered_at is not None and now - answered_at >= _SETTLE_SECONDS
            # Electing at the first answer would let one server with wrong weights decide; waiting for all would let one
            # server that is down hold up the run.
            if not self._elected and answered_at is not None and (everybody or settled):
                await self._elect()
            if self._elected and (self._look or not self._missing()):
                return
            # A wrong token does not become right with time.
            refused = everybody and all(isinstance(monitor.error, AuthError) for monitor in self.monitors.values())
            if self._look and self.monitors and (refused or now - start >= self.settings.connect_seconds):
                await self._elect()  # of those that have answered, if any; the others can still be admitted
                return
            # Only once all were asked: for a server that was not, there would be no reason to report.
            if refused or (asked and now - start >= self.settings.connect_seconds):
                raise self._why_not_connected()
            await self.wait_for_news(0.5)  # the limits above pass without any news

    async def settle(self, seconds: float) -> bool:
        """Wait until every server that answers has had its replicas checked; False if it takes more than `seconds`."""
        end = self.now() + seconds
        while not all(one.contacted and (one.error or one.admission.settled) for one in self.monitors.values()):
            if self.now() >= end:
                return False
            await self.wait_for_news(min(0.5, end - self.now()))
        return True

    async def _elect(self) -> None:
        """Decide, from all servers that have answered, what each pool is and computes, and let replicas be admitted."""
        names = sorted({name for monitor in self.monitors.values() for name in monitor.infos})
        members: list[tuple[Pool, ReplicaMonitor]] = []
        for name in names:
            seen = {address: one.infos[name] for address, one in self.monitors.items() if name in one.infos}
            pool = self.pool(name)
            try:
                identity = pool.choose(seen, self.settings.expected_weights.get(name, ""))
            except IncompatibleTeacherError as error:
                if not self._look:
                    raise
                pool.undecided = error
                continue
            agreed = [address for address, info in seen.items() if Identity.of(info) == identity]
            # A single replica has none to vote with: its own scores become the reference when it is admitted.
            members += [(pool, self.monitors[address]) for address in agreed if len(agreed) > 1]
        await self._settle_references(members)
        self._elected = True
        for monitor in self.monitors.values():
            monitor.admission.open()

    async def _settle_references(self, members: list[tuple[Pool, ReplicaMonitor]]) -> None:
        """Let the replicas of a teacher vote on one row; of two that disagree, the one listed first counts as right."""
        rows = {pool.name: self.check_rows.draw(monitor.infos[pool.name]) for pool, monitor in members}
        asked = {
            asyncio.create_task(
                monitor.admission.score_row(monitor.infos[pool.name], rows[pool.name], _SETTLE_SECONDS)
            ): pool
            for pool, monitor in members
        }
        if not asked:
            return
        done, late = await asyncio.wait(asked, timeout=_SETTLE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        vectors: dict[str, list[NDArray[np.float32]]] = {}
        # In the order of the list instead of arrival, so that ties do not depend on timing.
        for task in (task for task in asked if task in done):
            vector = None if task.exception() is not None else task.result()
            if vector is not None:
                vectors.setdefault(asked[task].name, []).append(vector)
        for name, found in vectors.items():
            self.pools[name].settle_reference(rows[name], found)

    def _missing(self) -> list[str]:
        """Teachers that must have a usable replica before connect returns, but have none."""
        asked = {name for source in self._sources for name in source.teachers or ()}
        names = asked or set(self.pools)
        return sorted(name for name in names if not any(self._usable(name))) or ([] if names else [_ANY])

    def _awaited(self) -> Iterator[str]:
        """The servers, with what they are loading."""
        for address, monitor in self.monitors.items():
            names = ", ".join(name for name in monitor.loading if self.wants(name, address))
            yield f"{address} (still loading {names})" if names else address

    def _why_not_connected(self) -> OpdError:
        monitors = self.monitors.values()
        errors = [monitor.error for monitor in monitors if monitor.error is not None]
        sentences = " ".join(str(error) for error in errors)
        if not self.monitors:
            listed = ", ".join(source.text for source in self._sources)
            return UnavailableError(f"no teacher server is listed at {listed}; check the file or the name.")
        # From what all servers have in common to what one teacher lacks: the first that applies explains the rest.
        if len(errors) == len(self.monitors):
            if all(isinstance(error, AuthError) for error in errors):
                return AuthError(f"no teacher server accepts this client's credentials: {sentences}")
            return UnavailableError(f"no teacher server answers: {sentences} Start one or correct the address.")
        return self._why_missing(self._missing())

    def _why_missing(self, missing: list[str]) -> OpdError:
        monitors = self.monitors.values()
        served = sorted({name for monitor in monitors for name in monitor.infos})
        loading = [(a, name) for a, one in self.monitors.items() for name in one.loading if self.wants(name, a)]
        for address, name in loading:
            if missing == [_ANY] or name in missing:
                return UnavailableError(
                    f"{address} is still loading teacher {name!r} after {self.settings.connect_seconds:g} s; raise "
                    "connect_seconds, or connect once it is loaded."
                )
        if missing == [_ANY]:
            return TeacherNotFoundError(
                f"{', '.join(self.monitors)} answered, but none of them has a teacher that may be used: load one, "
                "raise connect_seconds if one is still loading, or check the teacher names behind the addresses."
            )
        absent = [name for name in missing if name not in served]
        if absent:
            return TeacherNotFoundError(
                f"teacher {absent[0]!r} is not served in this fleet; it serves {', '.join(served) or 'nothing'}."
            )
        reasons = [
            f"{monitor.address} is {life.state}, {life.reason}"
            for monitor in monitors
            for name, life in monitor.lives.items()
            if name in missing
        ]
        return UnavailableError(f"teacher {missing[0]!r} has no usable replica: {'; '.join(reasons)}.")

    async def wait_for_news(self, seconds: float) -> None:
        """Wait, for at most `seconds`, until a replica changes its state or a server is asked for the first time."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    # Discovery.

    async def _keep_discovering(self) -> None:
        if all(source.text.partition(":")[0] not in ("file", "dns") for source in self._sources):
            return
        while True:
            await asyncio.sleep(self.settings.discovery_seconds)
            try:
                await self._discover(first=False)
            except Exception:
                log.exception("discovery failed; the servers known so far are kept")

    async def _discover(self, *, first: bool) -> None:
        # At the start nothing is known, so a wrong file is an error; later it leaves the known servers as they are.
        self._found = await resolve_all(self._sources, {} if first else self._found)
        self._places = merge(self._found)
        for address in self._places:
            if address not in self.monitors:
                self._join(address)
        for address, monitor in list(self.monitors.items()):
            if address not in self._places and not monitor.leaving:
                task = asyncio.create_task(self._leave(monitor), name=f"leave {address}")
                self._leavers.add(task)
                task.add_done_callback(self._leavers.discard)

    def _join(self, address: str) -> None:
        server = self.on_join(address)
        monitor = self.monitors[address] = ReplicaMonitor(address, self._link(address), server, self)
        # Before the election no replica is admitted: the first would decide for all what the teacher is.
        if self._elected:
            monitor.admission.open()
        monitor.start()

    async def _leave(self, monitor: ReplicaMonitor) -> None:
        """Let a server that is no longer listed finish its RPCs, then forget it unless it is listed again."""
        monitor.leaving = True
        for name, life in monitor.lives.items():
            monitor.apply(name, life.retired(self.now(), "no longer listed"))
        while monitor.server.rpcs:
            if monitor.address in self._places:
                monitor.leaving = False  # its next description leads to a new check
                return
            await asyncio.sleep(0.1)
        await monitor.stop()
        self.monitors.pop(monitor.address, None)
        self.on_leave(monitor.address)
        if monitor.address in self._places:  # listed again during `stop`; `_discover` skips addresses with a monitor
            self._join(monitor.address)

    async def close(self) -> None:
        """Stop discovery and all monitors."""
        tasks = [task for task in (self._discovery, *self._leavers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(monitor.stop() for monitor in self.monitors.values()), return_exceptions=True)
