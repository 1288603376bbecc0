"""Teachers that share a memory budget: who sleeps, who is woken, and what is promised to whom."""

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
    ConfigError,
    OverloadedError,
    UnavailableError,
)
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.residency.memory_budget import MemoryBudget
from teacher_server.residency.teacher import Teacher
from teacher_server.settings import LimitSettings

SAMPLED = PayloadSpec.sampled()


async def test_the_least_recently_used_teacher_sleeps_when_memory_is_short(
    start: Any, items: Any, tmp_path: Path
) -> None:
    models = weight_folders(tmp_path, a=100, b=100, c=100)
    client = await start(models, engine={"memory_budget_bytes": 250})
    states = lambda: {t.name: t.state for t in client.server.shared.teachers}  # noqa: E731
    assert states() == {"a": pb.TEACHER_STATE_ASLEEP, "b": pb.TEACHER_STATE_READY, "c": pb.TEACHER_STATE_READY}
    assert client.engines[models["a"]].asleep
    assert await client.health("a") == health_pb2.HealthCheckResponse.SERVING
    assert len(await client.score(items(1), SAMPLED, teacher="a")) == 1
    assert states() == {"a": pb.TEACHER_STATE_READY, "b": pb.TEACHER_STATE_ASLEEP, "c": pb.TEACHER_STATE_READY}
    await client.score(items(1), SAMPLED, teacher="c")
    await client.score(items(1), SAMPLED, teacher="b")
    assert states()["a"] == pb.TEACHER_STATE_ASLEEP
    await client.settled()


async def test_busy_teachers_are_not_put_to_sleep(start: Any, items: Any, tmp_path: Path) -> None:
    models = weight_folders(tmp_path, a=100, b=100)
    client = await start(models, engine={"memory_budget_bytes": 150})
    client.engines[models["b"]].before_score = gate = EngineGate()
    busy = asyncio.create_task(client.score(items(1), SAMPLED, teacher="b"))
    await until(lambda: gate.held)
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, teacher="a")
    assert type(error_from_rpc(caught.value)) is OverloadedError
    gate.open()
    await busy
    await client.score(items(1), SAMPLED, teacher="a")
    with pytest.raises(ConfigError, match="memory_budget_bytes is"):
        (tmp_path / "big").mkdir()
        (tmp_path / "big" / "model.safetensors").write_bytes(bytes(200))
        await client.server.shared.teachers.load("big", str(tmp_path / "big"))


def allocating(numpy_engine: Any, sizes: dict[str, int]) -> Any:
    """Engines that say how many bytes they took, by the end of their model's name."""

    class Allocating(numpy_engine):
        def memory_bytes(self) -> int:
            return next((size for name, size in sizes.items() if self.model.endswith(name)), 0)

    return Allocating


async def test_what_an_engine_allocated_counts_rather_than_its_files(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    models = weight_folders(tmp_path, a=100, b=100)
    make = allocating(numpy_engine, {"a": 200, "b": 200, "hub/big": 400})
    client = await start(models, make=make, engine={"memory_budget_bytes": 350})
    teachers = client.server.shared.teachers
    assert [t.state for t in teachers] == [pb.TEACHER_STATE_ASLEEP, pb.TEACHER_STATE_READY]
    assert [t.held_bytes for t in teachers] == [0, 200]
    with pytest.raises(ConfigError, match=r"hub/big.* needs 400 bytes"):
        await teachers.load("hub/big", "hub/big")
    assert client.engines["hub/big"].closed and len(list(teachers)) == 2


async def test_a_newcomer_larger_than_its_files_sleeps_while_the_others_are_busy(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    models = weight_folders(tmp_path, a=100, b=100)
    newcomer = models.pop("b")
    make = allocating(numpy_engine, {"a": 100, "b": 200})
    client = await start(models, make=make, engine={"memory_budget_bytes": 250})
    async with client.server.shared.teachers.use("a"):
        teacher = await client.server.shared.teachers.load("b", newcomer)
        assert teacher.state == pb.TEACHER_STATE_ASLEEP and client.engines[newcomer].asleep
    await client.score(items(1), SAMPLED, teacher="b")
    assert client.server.shared.teachers.get("a").state == pb.TEACHER_STATE_ASLEEP


async def test_a_teacher_of_unknown_size_is_refused_under_a_budget(start: Any) -> None:
    client = await start({}, engine={"memory_budget_bytes": 1000})
    with pytest.raises(ConfigError, match="memory_budget_bytes"):
        await client.server.shared.teachers.load("t", "hub/unknown")
    assert client.engines["hub/unknown"].closed


async def test_a_teacher_that_cannot_be_woken_says_why_and_gives_its_room_back(start: Any, items: Any) -> None:
    client = await start()
    await client.server.shared.teachers.sleep("t")
    engine = client.engines["numpy"]
    engine.wake = lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory"))
    with pytest.raises(grpc.RpcError, match="woken: RuntimeError: CUDA out of"):
        await client.score(items(1), SAMPLED)
    assert client.server.shared.teachers.get("t").held_bytes == 0
    del engine.wake
    await client.score(items(1), SAMPLED)
    engine.sleep = engine.wake = lambda: (_ for _ in ()).throw(RuntimeError("no host memory"))
    with pytest.raises(UnavailableError, match="sleep: RuntimeError: no host memory"):
        await client.server.shared.teachers.sleep("t")
    assert client.server.shared.teachers.get("t").state == pb.TEACHER_STATE_READY
    await client.score(items(1), SAMPLED)


@pytest.mark.parametrize("step", ["wake", "sleep"])
async def test_a_call_cancelled_while_teachers_change_places_leaves_the_books_right(
    step: str, start: Any, items: Any, tmp_path: Path, cancel_midway: Any
) -> None:
    moving, go_on = threading.Event(), threading.Event()
    client = await start(weight_folders(tmp_path, a=100, b=100), engine={"memory_budget_bytes": 150})
    teachers = client.server.shared.teachers
    engine = client.engines[str(tmp_path / ("a" if step == "wake" else "b"))]

    def slowly() -> None:
        moving.set()
        go_on.wait(120)
        engine.asleep = step == "sleep"

    setattr(engine, step, slowly)
    call = asyncio.create_task(teachers.wake("a"))
    await cancel_midway(call, moving, go_on)
    delattr(engine, step)
    assert sum(t.held_bytes for t in teachers if t.state == pb.TEACHER_STATE_ASLEEP) == 0
    for name in "abab":
        await client.score(items(1), SAMPLED, teacher=name)
        assert {t.name: t.held_bytes for t in teachers} == {"a": 0, "b": 0, name: 100}
    await client.settled()


@pytest.mark.parametrize("end", ["unload", "death"])
async def test_a_teacher_that_goes_while_it_is_put_to_sleep_for_another_is_not_called_ready(
    end: str, start: Any, items: Any, tmp_path: Path
) -> None:
    client = await start(weight_folders(tmp_path, a=100, b=100), engine={"memory_budget_bytes": 150})
    teachers, goes = client.server.shared.teachers, client.server.shared.teachers.get("b")
    gate = EngineGate()

    def score(batch: Any) -> None:
        gate(batch)
        if end == "death":
            raise RuntimeError("CUDA error: device-side assert triggered")

    client.engines[str(tmp_path / "b")].before_score = score
    left = asyncio.create_task(client.score(items(1), SAMPLED, teacher="b"))
    await until(lambda: gate.held)
    left.cancel()  # its batch goes on
    await until(lambda: not goes.in_flight)
    worker, waking = goes.worker, asyncio.create_task(teachers.wake("a"))
    await until(lambda: goes.state == pb.TEACHER_STATE_ASLEEP and worker._tasks)
    unloading = asyncio.create_task(teachers.unload("b", 0.0) if end == "unload" else asyncio.sleep(0))
    await until(lambda: end == "death" or worker._closing)  # a thread closes it: no earlier is its task refused
    gate.open()
    with pytest.raises(UnavailableError, match=r"'b' .*sleep: teacher 'b' .*not running"):
        await waking
    await unloading
    await until(lambda: goes.state == (pb.TEACHER_STATE_UNSPECIFIED if end == "unload" else pb.TEACHER_STATE_FAILED))
    if end == "unload":
        await client.score(items(1), SAMPLED, teacher="a")


async def test_a_teacher_that_is_being_freed_while_it_falls_asleep_is_never_called_ready() -> None:
    """Its worker has been taken from it then, and its state is the last thing that changes."""
    states: list[int] = []

    async def set_state(teacher: Teacher, state: int) -> None:
        teacher.state = state
        teacher.worker = None  # as `Teachers.unload` leaves it while it closes the worker
        states.append(state)

    teacher = Teacher("t", "numpy", LimitSettings(), state=pb.TEACHER_STATE_READY, held_bytes=100)
    with pytest.raises(UnavailableError, match=r"'t' .*put to sleep"):
        await MemoryBudget(150, lambda: [teacher], set_state).put_to_sleep(teacher)
    assert states == [pb.TEACHER_STATE_ASLEEP] and teacher.held_bytes == 100
