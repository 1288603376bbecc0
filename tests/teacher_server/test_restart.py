"""An engine that dies or hangs: noticed, told, and restarted with the weights it had, or the process ends."""

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from waiting import PATIENCE, EngineGate, until

from opd.errors import (
    UnavailableError,
)
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.server import TeacherServer
from teacher_server.settings import ServerSettings

SAMPLED = PayloadSpec.sampled()


def die_later(engine: Any) -> None:
    def explode(batch: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    engine.before_score = explode


async def test_a_dead_engine_ends_the_process_by_default(start: Any, items: Any) -> None:
    client = await start()
    die_later(client.engines["numpy"])
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED)
    assert type(error_from_rpc(caught.value)) is UnavailableError
    assert await asyncio.wait_for(client.server.wait(), 120) == 20


async def test_a_dead_engine_ends_a_server_that_still_loads_another_teacher(numpy_engine: Any) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def make(model: str) -> Any:
        if model == "large":
            loading.set()
            go_on.wait(PATIENCE)
        return numpy_engine(model)

    server = TeacherServer(ServerSettings(metrics_port=-1), make)
    starting = asyncio.create_task(server.start({"t": "numpy", "u": "large"}))
    await asyncio.to_thread(loading.wait, 120)
    server.shared.teachers.get("t").worker._die("CUDA error: the context is lost")
    try:
        await asyncio.wait({starting}, timeout=PATIENCE / 2)
        assert starting.cancelled() and server.exit_code == 20
    finally:
        go_on.set()
        await asyncio.gather(starting, return_exceptions=True)


async def kill_engine(client: Any, items: Any) -> Any:
    """Let the engine die of requests; gives the dead one."""
    dead = client.engines["numpy"]
    die_later(dead)
    outcomes = await asyncio.gather(
        *(client.score(items(1, seed=s), SAMPLED) for s in range(4)), return_exceptions=True
    )
    assert any(isinstance(outcome, grpc.RpcError) for outcome in outcomes)
    return dead


async def revived(client: Any, dead: Any) -> None:
    """Wait for another engine that serves."""
    await until(lambda: client.engines["numpy"] is not dead)
    await until(lambda: client.server.health.status("t") == 1)


async def test_a_dead_engine_has_freed_its_memory_before_the_next_is_built(start: Any, items: Any) -> None:
    client = await start(engine={"on_failure": "restart"})
    dead = client.engines["numpy"]
    freed: list[bool] = []

    def close_slowly() -> None:
        time.sleep(0.5)
        freed.append(True)

    dead.close = close_slowly
    await kill_engine(client, items)
    await until(lambda: client.engines["numpy"] is not dead)
    assert freed


async def test_a_thread_that_a_library_ends_leaves_nobody_waiting(start: Any, items: Any) -> None:
    client = await start(engine={"on_failure": "restart"})
    dead, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    running, end = threading.Event(), threading.Event()

    def quit_the_thread(batch: Any) -> None:
        running.set()
        end.wait(120)
        raise SystemExit(1)

    dead.before_score = quit_the_thread
    call = asyncio.create_task(client.score(items(2), SAMPLED))
    await asyncio.to_thread(running.wait, 120)
    task = worker.call(lambda engine: engine.head())
    end.set()
    with pytest.raises(grpc.RpcError, match="ended while"):
        await asyncio.wait_for(call, 120)
    with pytest.raises(UnavailableError, match="not running"):
        await asyncio.to_thread(task.result, 120)
    await revived(client, dead)
    assert dead.closed
    await client.score(items(1), SAMPLED)


async def test_a_dead_engine_is_restarted_when_asked(start: Any, items: Any) -> None:
    client = await start(engine={"on_failure": "restart"})
    dead = await kill_engine(client, items)
    await revived(client, dead)
    assert len(await client.score(items(2), SAMPLED)) == 2
    assert dead.closed
    assert client.server.shared.metrics.restarts.labels("t")._value.get() == 1
    await client.settled()


async def test_an_engine_that_dies_after_a_swap_comes_back_with_the_swapped_weights(
    start: Any, items: Any, tmp_path: Path, weights: Any
) -> None:
    client = await start(engine={"on_failure": "restart"})
    first = (await client.info()).weights_hash
    second = await client.server.shared.teachers.update_weights("t", weights(tmp_path / "w", 5))
    assert second != first
    await revived(client, await kill_engine(client, items))
    assert (await client.info()).weights_hash == client.engines["numpy"].info.weights_hash == second
    assert len(await client.score(items(2), SAMPLED)) == 2


@pytest.mark.parametrize("other", ["other weights", "nothing"])
async def test_a_teacher_whose_swapped_weights_are_gone_has_failed_rather_than_answer_with_others(
    start: Any, items: Any, tmp_path: Path, weights: Any, other: str
) -> None:
    client = await start({"t": "numpy", "u": "other"}, engine={"on_failure": "restart"})
    await client.server.shared.teachers.update_weights("t", weights(tmp_path / "w", 5))
    if other == "nothing":
        shutil.rmtree(tmp_path / "w")
    else:
        weights(tmp_path / "w", 6)
    await kill_engine(client, items)
    teachers = client.server.shared.teachers
    failed = pb.TEACHER_STATE_FAILED
    await until(lambda: teachers.get("t").state == failed and "weights" in teachers.get("t").reason)
    assert await client.health("t") == 2
    with pytest.raises(UnavailableError) as caught:
        async with teachers.use("t"):
            pass
    assert "is failed" in str(caught.value) and str(tmp_path / "w") in str(caught.value)
    assert len(await client.score(items(1), SAMPLED, teacher="u")) == 1
    # An operator's word brings the model's own weights back.
    await teachers.unload("t", 1.0)
    await teachers.load("t", "numpy")
    assert len(await client.score(items(1), SAMPLED)) == 1
    await client.settled()


async def test_bad_requests_between_good_ones_do_not_count_as_a_dead_engine(start: Any, items: Any) -> None:
    client = await start()
    engine = client.engines["numpy"]

    def sometimes(batch: Any) -> None:
        if any(entry.item.prompt_length == 5 for entry in batch):
            raise ValueError("odd shape")

    engine.before_score = sometimes
    for _ in range(3):
        for _ in range(2):  # a third in a row would end it
            with pytest.raises(grpc.RpcError):
                await client.score(items(1, prompt=5), SAMPLED)
        assert len(await client.score(items(1), SAMPLED)) == 1
    assert not engine.closed


async def test_an_engine_that_hangs_ends_the_process(start: Any, items: Any) -> None:
    client = await start(engine={"stall_seconds": 0.2})
    client.engines["numpy"].before_score = gate = EngineGate()
    stuck = asyncio.create_task(client.score(items(1), SAMPLED))
    await asyncio.wait_for(client.server._stop.wait(), 120)
    assert client.server.exit_code == 20
    stuck.cancel()
    gate.open()


async def test_an_engine_that_comes_back_to_a_full_memory_sleeps_whatever_its_calls_of_before(
    start: Any, items: Any, numpy_engine: Any
) -> None:
    """Calls that the dead engine answered may still be on their way, and a caller may wait to unload the teacher."""
    again, building, build = False, threading.Event(), threading.Event()

    def make(model: str) -> Any:
        if again:
            building.set()
            build.wait(120)
        engine = numpy_engine(model)
        engine.bytes = 100
        return engine

    client = await start(
        {"t": "numpy", "u": "other"}, make=make, engine={"memory_budget_bytes": 150, "on_failure": "restart"}
    )
    teachers, sent, leave = client.server.shared.teachers, asyncio.Semaphore(0), asyncio.Event()

    async def slow_reader() -> None:
        sent.release()
        await leave.wait()

    client.server.points.set("before_trailer", slow_reader)
    answered = asyncio.create_task(client.score(items(1), SAMPLED))
    await sent.acquire()
    again = True
    dead = await kill_engine(client, items)
    await asyncio.to_thread(building.wait, 120)
    other = asyncio.create_task(client.score(items(1), SAMPLED, teacher="u"))
    await sent.acquire()
    unloading = asyncio.create_task(teachers.unload("t", 300.0))
    await until(lambda: teachers.get("t").unloads)
    build.set()
    await until(lambda: teachers.get("t").state == pb.TEACHER_STATE_ASLEEP or client.server._stop.is_set())
    assert not client.server._stop.is_set() and client.engines["numpy"] is not dead
    unloading.cancel()
    leave.set()
    await asyncio.gather(answered, other)
    await until(lambda: not teachers.get("t").unloads)
    assert len(await client.score(items(2), SAMPLED)) == 2
    await client.settled()
