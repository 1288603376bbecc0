"""Several teachers on one server: load, unload, swap, health, and who may ask for it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from waiting import EngineGate, until
from weight_folders import weight_folders

from opd.errors import (
    InvalidRequestError,
    OverloadedError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb

SAMPLED = PayloadSpec.sampled()


async def test_a_teacher_is_loaded_and_unloaded_while_another_serves(start: Any, items: Any) -> None:
    client = await start()
    teachers = client.server.shared.teachers
    await teachers.load("u", "second")
    assert await client.health("u") == health_pb2.HealthCheckResponse.SERVING
    both = await asyncio.gather(
        client.score(items(2), SAMPLED, teacher="t"), client.score(items(2), SAMPLED, teacher="u")
    )
    assert (both[0][0].sampled == both[1][0].sampled).all()
    with pytest.raises(InvalidRequestError, match="already"):
        await teachers.load("u", "third")
    await teachers.unload("u", 1.0)
    assert client.engines["second"].closed
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, teacher="u")
    assert type(error_from_rpc(caught.value)) is TeacherNotFoundError
    with pytest.raises(grpc.RpcError) as caught:
        await client.health("u")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await client.score(items(1), SAMPLED)


async def test_unloading_waits_for_calls_in_flight(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(client.score(items(1), SAMPLED))
    await until(lambda: gate.held)
    unloading = asyncio.create_task(client.server.shared.teachers.unload("t", 300.0))
    await until(lambda: client.server.health.status("t") != health_pb2.HealthCheckResponse.SERVING)
    assert not unloading.done()
    gate.open()
    await unloading
    assert len(await running) == 1
    assert await client.health() == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_who_waits_for_a_teacher_while_it_is_unloaded_is_told_so(start: Any) -> None:
    teachers = (await start()).server.shared.teachers
    async with teachers.get("t").changing:
        unloading = asyncio.create_task(teachers.unload("t", 0.0))
        await until(lambda: teachers.get("t").unloads)
        for _ in range(10):  # turns of the loop in which it gets as far as it can
            await asyncio.sleep(0)
        sleeping = asyncio.create_task(teachers.sleep("t"))
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match=r"teacher 't' is unloaded\."):
        await sleeping
    await unloading


async def test_a_call_beyond_the_grace_is_cut_with_a_retryable_error(start: Any, items: Any) -> None:
    client = await start()
    release, admitted = asyncio.Event(), asyncio.Event()

    async def stay() -> None:
        admitted.set()
        await release.wait()

    client.server.points.set("admitted", stay)
    running = asyncio.create_task(client.score(items(1), SAMPLED))
    await asyncio.wait_for(admitted.wait(), 120)
    await client.server.shared.teachers.unload("t", 0.05)
    release.set()
    with pytest.raises(grpc.RpcError) as caught:
        await running
    assert error_from_rpc(caught.value).status in ("UNAVAILABLE", "CANCELLED")
    await client.settled()


async def test_an_unload_that_is_cancelled_while_it_waits_leaves_the_teacher_serving(start: Any, items: Any) -> None:
    client = await start()
    teachers, held = client.server.shared.teachers, asyncio.Event()
    serving = health_pb2.HealthCheckResponse.SERVING

    async def hold() -> None:
        async with teachers.use("t"):
            await held.wait()

    call = asyncio.create_task(hold())
    await asyncio.sleep(0)
    first, second = (asyncio.create_task(teachers.unload("t", 300.0)) for _ in range(2))
    await until(lambda: client.server.health.status("t") != serving)
    for unloading, after in ((first, pb.TEACHER_STATE_DRAINING), (second, pb.TEACHER_STATE_READY)):
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert teachers.get("t").state == after  # another call may wait for it still
    assert await client.health("t") == serving
    held.set()
    await call
    assert len(await client.score(items(1), SAMPLED)) == 1
    await teachers.unload("t", 300.0)
    assert client.engines["numpy"].closed


async def test_a_late_unload_leaves_the_next_teacher_of_that_name_alone(start: Any, items: Any) -> None:
    client = await start()
    teachers = client.server.shared.teachers
    await teachers.load("u", "second")
    held = asyncio.Event()

    async def hold() -> None:
        async with teachers.use("u"):
            await held.wait()

    call = asyncio.create_task(hold())
    await asyncio.sleep(0)
    patient = asyncio.create_task(teachers.unload("u", 30.0))
    await asyncio.sleep(0)
    await teachers.unload("u", 0.0)
    await teachers.load("u", "third")
    held.set()
    await asyncio.gather(call, patient)
    await client.score(items(1), SAMPLED, teacher="u")
    assert await client.health("u") == health_pb2.HealthCheckResponse.SERVING


def slow_to_load(numpy_engine: Any, slow: str) -> Any:
    """Engines of which that of model `slow` waits in the middle of being built."""

    class Slow(numpy_engine):
        loading, go_on, made = threading.Event(), threading.Event(), []

        def __init__(self, model: str) -> None:
            super().__init__(model)
            if model == slow:
                self.made.append(self)
                self.loading.set()
                self.go_on.wait(120)

    return Slow


async def test_a_long_load_holds_up_nobody(start: Any, items: Any, numpy_engine: Any, tmp_path: Path) -> None:
    models = weight_folders(tmp_path, t=100, u=100, slow=100)
    slow = models.pop("slow")
    slow_engine = slow_to_load(numpy_engine, slow)
    client = await start(models, make=slow_engine, engine={"memory_budget_bytes": 300})
    teachers = client.server.shared.teachers
    load = asyncio.create_task(teachers.load("slow", slow))

    async def everything_else() -> None:
        await client.score(items(2), SAMPLED, teacher="t")
        assert {t.name for t in (await client.stub.Describe(pb.DescribeRequest())).teachers} == {"t", "u"}
        assert len((await client.stub.GetLoad(pb.GetLoadRequest())).teachers) == 3
        await teachers.sleep("t")
        await client.score(items(1), SAMPLED, teacher="t")
        await teachers.sleep("u")
        await teachers.wake("u")
        await teachers.unload("u", 1.0)
        with pytest.raises(grpc.RpcError, match="loading"):
            await client.score(items(1), SAMPLED, teacher="slow")

    try:
        await asyncio.to_thread(slow_engine.loading.wait, 120)
        await asyncio.wait_for(everything_else(), 120)
        assert not load.done()
    finally:
        slow_engine.go_on.set()
    assert (await load).state == pb.TEACHER_STATE_READY
    await client.score(items(1), SAMPLED, teacher="slow")


async def test_what_a_load_was_promised_is_not_given_to_others(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    models = weight_folders(tmp_path, t=100, slow=100)
    slow = models.pop("slow")
    slow_engine = slow_to_load(numpy_engine, slow)
    client = await start(models, make=slow_engine, engine={"memory_budget_bytes": 150})
    load = asyncio.create_task(client.server.shared.teachers.load("slow", slow))
    try:
        await asyncio.to_thread(slow_engine.loading.wait, 120)
        assert client.engines[models["t"]].asleep
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(client.score(items(1), SAMPLED, teacher="t"), 120)
        assert type(error_from_rpc(caught.value)) is OverloadedError
    finally:
        slow_engine.go_on.set()
    await load
    await client.score(items(1), SAMPLED, teacher="t")


async def test_a_load_that_nobody_waits_for_any_more_leaves_nothing(
    start: Any, numpy_engine: Any, cancel_midway: Any
) -> None:
    slow_engine = slow_to_load(numpy_engine, "second")
    client = await start(make=slow_engine)
    load = asyncio.create_task(client.server.shared.teachers.load("late", "second"))
    await cancel_midway(load, slow_engine.loading, slow_engine.go_on)
    assert slow_engine.made[0].closed and [t.name for t in client.server.shared.teachers] == ["t"]


async def test_an_unload_that_is_cancelled_while_the_teacher_loads_leaves_it_loading(
    start: Any, items: Any, numpy_engine: Any
) -> None:
    slow_engine = slow_to_load(numpy_engine, "second")
    client = await start(make=slow_engine)
    teachers = client.server.shared.teachers
    load = asyncio.create_task(teachers.load("late", "second"))
    try:
        await asyncio.to_thread(slow_engine.loading.wait, 120)
        unload = asyncio.create_task(teachers.unload("late", 300.0))
        await until(lambda: teachers.get("late").state == pb.TEACHER_STATE_DRAINING)
        unload.cancel()
        await asyncio.wait({unload})
        assert teachers.get("late").state == pb.TEACHER_STATE_LOADING
    finally:
        slow_engine.go_on.set()
    assert (await load).state == pb.TEACHER_STATE_READY
    assert len(await client.score(items(1), SAMPLED, teacher="late")) == 1


async def test_a_teacher_that_fails_its_self_test_is_not_served(start: Any, numpy_engine: Any) -> None:
    class Broken(numpy_engine):
        def _one(self, entry: Any) -> Any:
            scores = super()._one(entry)
            if scores.log_tail is not None:
                scores.log_tail[:] = 0.0
            return scores

    with pytest.raises(UnavailableError, match="self-test"):
        await start(make=Broken)


async def test_health_turns_to_serving_only_after_the_self_test(start: Any, numpy_engine: Any) -> None:
    seen: list[int] = []
    client = await start({})

    class Slow(numpy_engine):
        def _one(self, entry: Any) -> Any:
            seen.append(client.server.health.status("late"))
            return super()._one(entry)

    client.server.shared.teachers._starter._factory = Slow
    assert await client.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    await client.server.shared.teachers.load("late", "x")
    assert set(seen) == {health_pb2.HealthCheckResponse.NOT_SERVING}
    assert await client.health("late") == health_pb2.HealthCheckResponse.SERVING
    assert await client.health() == health_pb2.HealthCheckResponse.SERVING


async def test_each_wait_is_counted_as_the_wait_it_is(start: Any, items: Any) -> None:
    client = await start({"t": "first", "u": "second"})
    client.engines["first"].before_score = gate = EngineGate()
    workers = {name: client.server.shared.teachers.get(name).worker for name in "tu"}
    running = asyncio.create_task(client.score(items(1), SAMPLED, teacher="t"))
    await until(lambda: gate.held)
    calls = [asyncio.create_task(client.score(items(1), SAMPLED, teacher=name)) for name in "tu"]
    await until(lambda: workers["t"].load()[0] == 1 and workers["u"].load()[2] > 0)
    held = 1.0
    await asyncio.sleep(held)  # the wait that is measured
    client.engines["first"].seconds_per_batch = 0.4
    gate.open()
    (behind,), (beside,) = await asyncio.gather(*calls)
    await running
    # The same teacher's engine is busy: it waits in the queue. Another teacher waits for the device, already picked.
    assert behind.timings.queue >= held and behind.timings.queue > behind.timings.batch_wait
    assert beside.timings.batch_wait >= held and beside.timings.batch_wait > beside.timings.queue
    assert behind.timings.engine >= 0.39
