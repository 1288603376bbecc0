"""Weights are replaced on every replica of a teacher; one without them is named and stays out of the pool."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace

import pytest

from opd.errors import ConfigError, IncompatibleTeacherError, OpdError, ScopeError, TeacherNotFoundError
from opd.fleet.core import FleetCore
from opd.fleet.membership.discovery import Source
from opd.fleet.membership.link import ReplicaRequest
from opd.fleet.settings import FleetSettings, HealthSettings
from opd.fleet.weights import WeightsUpdate
from opd.wire.types import Scores
from opd.wire.v1 import teacher_pb2 as pb
from support.simulation import SimulatedFleet, SimulatedLink, SimulatedServer, run_virtual, score_batch


class Folders(SimulatedFleet):
    """Servers that find other weights in a folder, or refuse, where `answers` says so."""

    def __init__(self, servers: list[SimulatedServer], answers: dict[str, str | OpdError]) -> None:
        super().__init__(servers)
        self.answers = answers

    def link(self, address: str) -> SimulatedLink:
        fleet, server = self, self.servers[address]

        class Link(SimulatedLink):
            async def update_weights(self, teacher: str, folder: str, timeout: float) -> str:
                answer = fleet.answers.get(address, folder)
                if isinstance(answer, OpdError):
                    raise answer
                return await super().update_weights(teacher, answer, timeout)

        return Link(server)


def with_fleet(
    answers: dict[str, str | OpdError], act: Callable[[FleetCore], Awaitable[None]], *, count: int = 3
) -> None:
    async def run() -> None:
        servers = [SimulatedServer(f"s{i}:1", {"t": "old"}, 5000.0) for i in range(count)]
        settings = FleetSettings(health=HealthSettings(check_seed=0))
        core = FleetCore([Source(server.address) for server in servers], Folders(servers, answers).link, settings, "x")
        await core.connect()
        try:
            await act(core)
        finally:
            await core.close()

    run_virtual(run())


async def weights_of(core: FleetCore, rows: int = 20) -> set[str]:
    _, outcomes = await score_batch(core, [("t", 100)] * rows)
    return {one.weights_hash if isinstance(one, Scores) else str(one) for one in outcomes}


def test_all_replicas_take_the_weights_and_serve_them() -> None:
    async def act(core: FleetCore) -> None:
        assert await weights_of(core) == {"old"}
        update = await core.update_weights("t", "new", 10.0)
        assert update == WeightsUpdate("t", "new", ("s0:1", "s1:1", "s2:1"), {})
        assert "3 replicas serve weights new" in update.sentence()
        assert all(monitor.lives["t"].usable for monitor in core.monitors.values())
        assert await weights_of(core) == {"new"}
        again = await core.update_weights("t", "new", 10.0)
        assert not again.changed and "3 replicas serve weights new, as before." in again.sentence()

    with_fleet({}, act)


def test_a_replica_that_refuses_is_named_and_stays_out() -> None:
    async def act(core: FleetCore) -> None:
        update = await core.update_weights("t", "new", 10.0)
        assert update.updated == ("s0:1", "s2:1") and update.failures == {"s1:1": "no scope admin."}
        assert "s1:1 does not: no scope admin" in update.sentence()
        assert await weights_of(core) == {"new"}
        life = core.monitors["s1:1"].lives["t"]
        assert not life.usable and (life.state != "rejected" or "weights_hash" in life.reason)

    with_fleet({"s1:1": ScopeError("no scope admin.")}, act)


def test_when_no_replica_takes_them_the_old_weights_go_on_serving() -> None:
    async def act(core: FleetCore) -> None:
        with pytest.raises(ScopeError, match=r"no replica.* in new; s0:1: no; s1:1: no"):
            await core.update_weights("t", "new", 10.0)
        assert await weights_of(core) == {"old"}

    with_fleet({f"s{i}:1": ScopeError("no.") for i in range(2)}, act, count=2)


def test_a_replica_with_other_files_in_its_folder_is_outvoted() -> None:
    async def act(core: FleetCore) -> None:
        update = await core.update_weights("t", "new", 10.0)
        assert update.weights_hash == "new" and update.failures == {
            "s2:1": "the folder holds other weights there, stray"
        }
        assert await weights_of(core) == {"new"}

    with_fleet({"s2:1": "stray"}, act)


def test_two_replicas_that_found_different_weights_are_an_error_that_names_both() -> None:
    async def act(core: FleetCore) -> None:
        with pytest.raises(IncompatibleTeacherError, match=r"s0:1 has new, s1:1 has stray"):
            await core.update_weights("t", "new", 10.0)

    with_fleet({"s1:1": "stray"}, act, count=2)


def test_a_pinned_hash_does_not_stand_against_a_deliberate_update() -> None:
    async def run() -> None:
        servers = [SimulatedServer(f"s{i}:1", {"t": "old"}, 5000.0) for i in range(2)]
        settings = FleetSettings(expected_weights={"t": "old"}, health=HealthSettings(check_seed=0))
        core = FleetCore([Source(s.address) for s in servers], SimulatedFleet(servers).link, settings, "x")
        await core.connect()
        assert (await core.update_weights("t", "new", 10.0)).updated == ("s0:1", "s1:1")
        assert await weights_of(core) == {"new"}
        await core.close()

    run_virtual(run())


def test_an_unknown_teacher_is_named() -> None:
    async def act(core: FleetCore) -> None:
        with pytest.raises(TeacherNotFoundError, match="'poetry'"):
            await core.update_weights("poetry", "new", 10.0)

    with_fleet({}, act)


def test_a_record_cannot_be_updated(tiny: SimpleNamespace, tmp_path: object) -> None:
    from opd.fleet.client import TeacherFleet
    from opd.fleet.settings import CacheSettings
    from opd.wire.types import PayloadSpec

    settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=tmp_path)})
    with TeacherFleet.connect(tiny.serve().address, settings=settings) as fleet:
        fleet.score("math", tiny.items(1), PayloadSpec.sampled())
    with (
        TeacherFleet.connect(f"store:{tmp_path}") as fleet,
        pytest.raises(ConfigError, match="connect to live servers"),
    ):
        fleet.update_weights("math", "anywhere")


def test_replicas_that_are_checked_at_the_same_time_agree_at_once() -> None:
    async def act(core: FleetCore) -> None:
        start = core.now()
        for folder in ("new", "newer", "old"):
            update = await core.update_weights("t", folder, 10.0)
            assert len(update.updated) == 6 and not update.failures
        assert core.now() - start < 1.0  # a replica that fails the check is only checked again after ten seconds

    with_fleet({}, act, count=6)


def test_a_check_that_began_before_an_update_decides_nothing_after_it() -> None:
    async def run() -> None:
        servers = [SimulatedServer(f"s{i}:1", {"t": "old"}, 5000.0) for i in range(2)]
        settings = FleetSettings(health=HealthSettings(check_seed=0))
        held, release = asyncio.Event(), asyncio.Event()
        release.set()

        class Link(SimulatedLink):
            async def score(
                self, request: ReplicaRequest, timeout: float | None, idle: float
            ) -> AsyncGenerator[tuple[int, Scores], None]:
                async for answer in super().score(request, timeout, idle):
                    if not release.is_set():
                        held.set()
                        await release.wait()
                    yield answer

        links = {one.address: Link(one) for one in servers}
        core = FleetCore([Source(address) for address in links], links.__getitem__, settings, "x")
        await core.connect()
        await until(core, lambda: all(one.lives["t"].usable for one in core.monitors.values()))
        release.clear()
        servers[0].crash()
        core.monitors["s0:1"].ping_soon()
        await until(core, lambda: not core.monitors["s0:1"].lives["t"].usable)
        servers[1].restart()
        core.monitors["s1:1"].ping_soon()
        await held.wait()  # its answer is that of the old weights
        servers[0].restart()
        update = asyncio.create_task(core.update_weights("t", "new", 10.0))
        await until(core, lambda: core.pools["t"].weights_hash == "new")
        release.set()
        assert (await update).updated == ("s0:1", "s1:1")
        assert not [one for m in core.monitors.values() for one in m.lives["t"].history if one.after == "rejected"]
        await core.close()

    run_virtual(run())


def test_a_description_from_before_an_adoption_does_not_make_the_pool_what_it_was() -> None:
    async def run() -> None:
        server = SimulatedServer("s0:1", {"t": "old"}, 5000.0)
        asked, release = asyncio.Event(), asyncio.Event()
        release.set()

        class Link(SimulatedLink):
            async def load(self, timeout: float) -> pb.GetLoadResponse:
                asked.set()
                await release.wait()
                return await super().load(timeout)

        core = FleetCore([Source("s0:1")], lambda address: Link(server), FleetSettings(), "x")
        await core.connect()
        release.clear()
        asked.clear()
        await asked.wait()  # a ping is under way that began when all was well, and describes nothing
        server.teachers = {"t": "new"}
        core.adopt("t")
        release.set()
        assert await weights_of(core) == {"new"}
        assert not [one for one in core.monitors["s0:1"].lives["t"].history if one.after == "rejected"]
        await core.close()

    run_virtual(run())


async def until(core: FleetCore, condition: Callable[[], bool]) -> None:
    while not condition():
        await core.members.wait_for_news(0.05)
