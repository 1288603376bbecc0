"""Several teachers on one server: load, unload, sleep, wake, hot swap, death and restart."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opd.errors import (
    ConfigError,
    IncompatibleTeacherError,
    InvalidRequestError,
    NonFiniteError,
    OverloadedError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.wire.channel import ClientSecurity
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import admin_pb2 as admin
from opd.wire.v1 import admin_pb2_grpc
from opd.wire.v1 import teacher_pb2 as pb

SAMPLED = PayloadSpec.sampled()


async def health(client: Any, service: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


def folders(root: Path, **sizes: int) -> dict[str, str]:
    """Model folders with so many bytes of weights."""
    models = {}
    for name, size in sizes.items():
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(bytes(size))
        models[name] = str(root / name)
    return models


def weights(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "seed").write_text(str(seed))
    return folder


async def test_a_teacher_is_loaded_and_unloaded_while_another_serves(start: Any, items: Any) -> None:
    client = await start()
    roster = client.server.shared.roster
    await roster.load("u", "second")
    assert await health(client, "u") == health_pb2.HealthCheckResponse.SERVING
    both = await asyncio.gather(
        client.score(items(2), SAMPLED, teacher="t"), client.score(items(2), SAMPLED, teacher="u")
    )
    assert (both[0][0].sampled == both[1][0].sampled).all()
    with pytest.raises(InvalidRequestError, match="already"):
        await roster.load("u", "third")
    await roster.unload("u", 1.0)
    assert client.engines["second"].closed
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, teacher="u")
    assert type(error_from_rpc(caught.value)) is TeacherNotFoundError
    with pytest.raises(grpc.RpcError) as caught:
        await health(client, "u")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await client.score(items(1), SAMPLED)


async def test_unloading_waits_for_calls_in_flight(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].seconds_per_batch = 0.3
    running = asyncio.create_task(client.score(items(1), SAMPLED))
    await asyncio.sleep(0.1)
    await client.server.shared.roster.unload("t", 10.0)
    assert len(await running) == 1
    assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_call_beyond_the_grace_is_cut_with_a_retryable_error(start: Any, items: Any) -> None:
    client = await start()
    release = asyncio.Event()
    client.server.shared.faults.set("admitted", release.wait)
    running = asyncio.create_task(client.score(items(1), SAMPLED))
    await asyncio.sleep(0.1)
    await client.server.shared.roster.unload("t", 0.05)
    release.set()
    with pytest.raises(grpc.RpcError) as caught:
        await running
    assert error_from_rpc(caught.value).status in ("UNAVAILABLE", "CANCELLED")
    await client.settled()


async def test_the_least_recently_used_teacher_sleeps_when_memory_is_short(
    start: Any, items: Any, tmp_path: Path
) -> None:
    models = folders(tmp_path, a=100, b=100, c=100)
    client = await start(models, engine={"memory_budget_bytes": 250})
    states = lambda: {t.name: t.state for t in client.server.shared.roster}  # noqa: E731
    assert states() == {"a": pb.TEACHER_STATE_ASLEEP, "b": pb.TEACHER_STATE_READY, "c": pb.TEACHER_STATE_READY}
    assert client.engines[models["a"]].asleep
    assert await health(client, "a") == health_pb2.HealthCheckResponse.SERVING
    assert len(await client.score(items(1), SAMPLED, teacher="a")) == 1
    assert states() == {"a": pb.TEACHER_STATE_READY, "b": pb.TEACHER_STATE_ASLEEP, "c": pb.TEACHER_STATE_READY}
    await client.score(items(1), SAMPLED, teacher="c")
    await client.score(items(1), SAMPLED, teacher="b")
    assert states()["a"] == pb.TEACHER_STATE_ASLEEP
    await client.settled()


async def test_busy_teachers_are_not_put_to_sleep(start: Any, items: Any, tmp_path: Path) -> None:
    models = folders(tmp_path, a=100, b=100)
    client = await start(models, engine={"memory_budget_bytes": 150})
    client.engines[models["b"]].seconds_per_batch = 0.4
    busy = asyncio.create_task(client.score(items(1), SAMPLED, teacher="b"))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, teacher="a")
    assert type(error_from_rpc(caught.value)) is OverloadedError
    await busy
    await client.score(items(1), SAMPLED, teacher="a")
    with pytest.raises(ConfigError, match="memory budget"):
        (tmp_path / "big").mkdir()
        (tmp_path / "big" / "model.safetensors").write_bytes(bytes(200))
        await client.server.shared.roster.load("big", str(tmp_path / "big"))


async def test_weights_are_swapped_between_batches_and_the_hash_changes(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start()
    before = (await client.info()).weights_hash
    old = await client.score(items(2), SAMPLED)
    fresh = await client.server.shared.roster.update_weights("t", weights(tmp_path / "w", 5))
    assert fresh == (await client.info()).weights_hash != before
    new = await client.score(items(2), SAMPLED, expected_weights_hash=fresh)
    assert new[0].weights_hash == fresh
    assert (new[0].sampled != old[0].sampled).any()
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, expected_weights_hash=before)
    assert type(error_from_rpc(caught.value)) is IncompatibleTeacherError


async def test_a_failed_swap_keeps_the_old_weights(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start()
    before = await client.score(items(1), SAMPLED)
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        await client.server.shared.roster.update_weights("t", tmp_path / "nowhere")
    after = await client.score(items(1), SAMPLED)
    assert (before[0].sampled == after[0].sampled).all()


async def operator(start: Any, tmp_path: Path, **settings: Any) -> tuple[Any, Any, Any]:
    """A client with admin scope, its admin stub and its metadata."""
    tokens, secret = tmp_path / "tokens.yaml", tmp_path / "secret"
    tokens.write_text("- {name: op, token: operator-secret-1, scopes: [score, admin]}\n")
    secret.write_text("operator-secret-1")
    client = await start(security=ClientSecurity(token_file=secret), security_={"tokens": tokens}, **settings)
    return client, admin_pb2_grpc.AdminServiceStub(client.channel), client.security.metadata()


async def test_weights_that_fail_the_self_test_are_taken_back_before_any_request_meets_them(
    start: Any, items: Any, tmp_path: Path
) -> None:
    client, stub, meta = await operator(start, tmp_path)
    before = await client.score(items(2), SAMPLED)
    client.engines["numpy"].seconds_per_batch = 0.01
    spoiled = weights(tmp_path / "w", 5)
    (spoiled / "seed").write_text("5 nan")
    traffic = [asyncio.create_task(client.score(items(2), SAMPLED)) for _ in range(20)]
    with pytest.raises(grpc.RpcError) as caught:
        await stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="t", folder=str(spoiled)), metadata=meta)
    error = error_from_rpc(caught.value)
    assert type(error) is NonFiniteError
    assert str(spoiled) in str(error) and "NaN" in str(error) and before[0].weights_hash in str(error)
    for during in await asyncio.gather(*traffic):
        assert (during[0].sampled == before[0].sampled).all()
    info = await client.info()
    assert (info.weights_hash, info.state) == (before[0].weights_hash, pb.TEACHER_STATE_READY)
    assert await health(client, "t") == health_pb2.HealthCheckResponse.SERVING
    healthy = weights(tmp_path / "w", 6)
    answer = await stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="t", folder=str(healthy)), metadata=meta)
    assert answer.weights_hash != before[0].weights_hash


async def test_a_teacher_whose_old_weights_are_lost_stops_serving(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start({"t": "numpy", "u": "other"})
    engine = client.engines["numpy"]
    spoiled = weights(tmp_path / "w", 5)
    (spoiled / "seed").write_text("5 nan")

    def prepare(folder: Path) -> Any:
        def exchange() -> None:
            engine._weights(5, True)

        return exchange

    engine.prepare_weights = prepare
    with pytest.raises(UnavailableError, match=r"failed.*refused.*not be restored"):
        await client.server.shared.roster.update_weights("t", spoiled)
    assert await health(client, "t") == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError, match="not be restored"):
        await client.score(items(1), SAMPLED)
    with pytest.raises(UnavailableError):
        await client.server.shared.roster.sleep("t")  # asleep would be as good as serving
    await client.score(items(1), SAMPLED, teacher="u")


async def test_reading_new_weights_holds_up_no_request(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start({"t": "numpy", "u": "other"})
    reading, go_on = threading.Event(), threading.Event()

    def wait(folder: Path) -> None:
        reading.set()
        go_on.wait(60)

    client.engines["numpy"].before_prepare = wait
    swap = asyncio.create_task(client.server.shared.roster.update_weights("t", weights(tmp_path / "w", 5)))
    try:
        await asyncio.to_thread(reading.wait, 60)
        for teacher in "tu":
            await asyncio.wait_for(client.score(items(2), SAMPLED, teacher=teacher), 30)
        assert not swap.done()
    finally:
        go_on.set()
    assert await swap == (await client.info()).weights_hash


async def test_a_long_load_holds_up_nobody(start: Any, items: Any, numpy_engine: Any, tmp_path: Path) -> None:
    loading, go_on = threading.Event(), threading.Event()

    class Slow(numpy_engine):
        def __init__(self, model: str) -> None:
            if model.endswith("slow"):
                loading.set()
                go_on.wait(60)
            super().__init__(model)

    models = folders(tmp_path, t=100, u=100, slow=100)
    slow = models.pop("slow")
    client = await start(models, make=Slow, engine={"memory_budget_bytes": 300})
    roster = client.server.shared.roster
    load = asyncio.create_task(roster.load("slow", slow))

    async def everything_else() -> None:
        await client.score(items(2), SAMPLED, teacher="t")
        assert {t.name for t in (await client.stub.Describe(pb.DescribeRequest())).teachers} == {"t", "u"}
        assert len((await client.stub.GetLoad(pb.GetLoadRequest())).teachers) == 3
        await roster.sleep("t")
        await client.score(items(1), SAMPLED, teacher="t")
        await roster.sleep("u")
        await roster.wake("u")
        await roster.unload("u", 1.0)
        with pytest.raises(grpc.RpcError, match="loading"):
            await client.score(items(1), SAMPLED, teacher="slow")

    try:
        await asyncio.to_thread(loading.wait, 60)
        await asyncio.wait_for(everything_else(), 30)
        assert not load.done()
    finally:
        go_on.set()
    assert (await load).state == pb.TEACHER_STATE_READY
    await client.score(items(1), SAMPLED, teacher="slow")


async def test_what_a_load_was_promised_is_not_given_to_others(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    class Slow(numpy_engine):
        def __init__(self, model: str) -> None:
            if model.endswith("slow"):
                loading.set()
                go_on.wait(60)
            super().__init__(model)

    models = folders(tmp_path, t=100, slow=100)
    slow = models.pop("slow")
    client = await start(models, make=Slow, engine={"memory_budget_bytes": 150})
    load = asyncio.create_task(client.server.shared.roster.load("slow", slow))
    try:
        await asyncio.to_thread(loading.wait, 60)
        assert client.engines[models["t"]].asleep
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(client.score(items(1), SAMPLED, teacher="t"), 30)
        assert type(error_from_rpc(caught.value)) is OverloadedError
    finally:
        go_on.set()
    await load
    await client.score(items(1), SAMPLED, teacher="t")


async def test_a_load_that_nobody_waits_for_any_more_leaves_nothing(start: Any, numpy_engine: Any) -> None:
    loading, go_on, made = threading.Event(), threading.Event(), []

    class Slow(numpy_engine):
        def __init__(self, model: str) -> None:
            super().__init__(model)
            if model == "slow":
                made.append(self)
                loading.set()
                go_on.wait(60)

    client = await start(make=Slow)
    load = asyncio.create_task(client.server.shared.roster.load("slow", "slow"))
    await asyncio.to_thread(loading.wait, 60)
    load.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert made[0].closed and [t.name for t in client.server.shared.roster] == ["t"]


def allocating(numpy_engine: Any, sizes: dict[str, int]) -> Any:
    """Engines that say how many bytes they took, by the end of their model's name."""

    class Allocating(numpy_engine):
        def memory_bytes(self) -> int:
            return next((size for name, size in sizes.items() if self.model.endswith(name)), 0)

    return Allocating


async def test_what_an_engine_allocated_counts_rather_than_its_files(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    models = folders(tmp_path, a=100, b=100)
    make = allocating(numpy_engine, {"a": 200, "b": 200, "hub/big": 400})
    client = await start(models, make=make, engine={"memory_budget_bytes": 350})
    roster = client.server.shared.roster
    assert [t.state for t in roster] == [pb.TEACHER_STATE_ASLEEP, pb.TEACHER_STATE_READY]
    assert [t.held_bytes for t in roster] == [0, 200]
    with pytest.raises(ConfigError, match=r"hub/big.* needs 400 bytes"):
        await roster.load("hub/big", "hub/big")
    assert client.engines["hub/big"].closed and len(roster) == 2


async def test_a_newcomer_larger_than_its_files_sleeps_while_the_others_are_busy(
    start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    models = folders(tmp_path, a=100, b=100)
    newcomer = models.pop("b")
    make = allocating(numpy_engine, {"a": 100, "b": 200})
    client = await start(models, make=make, engine={"memory_budget_bytes": 250})
    async with client.server.shared.roster.use("a"):
        teacher = await client.server.shared.roster.load("b", newcomer)
        assert teacher.state == pb.TEACHER_STATE_ASLEEP and client.engines[newcomer].asleep
    await client.score(items(1), SAMPLED, teacher="b")
    assert client.server.shared.roster.get("a").state == pb.TEACHER_STATE_ASLEEP


async def test_a_teacher_of_unknown_size_is_refused_under_a_budget(start: Any) -> None:
    client = await start({}, engine={"memory_budget_bytes": 1000})
    with pytest.raises(ConfigError, match="memory_budget_bytes"):
        await client.server.shared.roster.load("t", "hub/unknown")
    assert client.engines["hub/unknown"].closed


async def test_a_teacher_that_cannot_be_woken_says_why_and_gives_its_room_back(start: Any, items: Any) -> None:
    client = await start()
    await client.server.shared.roster.sleep("t")
    engine = client.engines["numpy"]
    engine.wake = lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory"))
    with pytest.raises(grpc.RpcError, match="cannot be woken: RuntimeError: CUDA out of memory"):
        await client.score(items(1), SAMPLED)
    assert client.server.shared.roster.get("t").held_bytes == 0
    del engine.wake
    await client.score(items(1), SAMPLED)
    engine.sleep = engine.wake = lambda: (_ for _ in ()).throw(RuntimeError("no host memory"))
    with pytest.raises(UnavailableError, match="cannot be put to sleep: RuntimeError: no host memory"):
        await client.server.shared.roster.sleep("t")
    assert client.server.shared.roster.get("t").state == pb.TEACHER_STATE_READY
    await client.score(items(1), SAMPLED)


@pytest.mark.parametrize("step", ["wake", "sleep"])
async def test_a_call_cancelled_while_teachers_change_places_leaves_the_books_right(
    step: str, start: Any, items: Any, numpy_engine: Any, tmp_path: Path
) -> None:
    moving, go_on = threading.Event(), threading.Event()
    client = await start(folders(tmp_path, a=100, b=100), engine={"memory_budget_bytes": 150})
    roster = client.server.shared.roster
    engine = client.engines[str(tmp_path / ("a" if step == "wake" else "b"))]

    def slowly() -> None:
        moving.set()
        go_on.wait(60)
        engine.asleep = step == "sleep"

    setattr(engine, step, slowly)
    call = asyncio.create_task(roster.wake("a"))
    await asyncio.to_thread(moving.wait, 60)
    call.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    delattr(engine, step)
    assert sum(t.held_bytes for t in roster if t.state == pb.TEACHER_STATE_ASLEEP) == 0
    for name in "abab":
        await client.score(items(1), SAMPLED, teacher=name)
        assert {t.name: t.held_bytes for t in roster} == {"a": 0, "b": 0, name: 100}
    await client.settled()


async def test_a_swap_whose_caller_leaves_is_finished_and_told(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start()
    spoiled = weights(tmp_path / "w", 5)
    (spoiled / "seed").write_text("5 nan")
    engine, swapping, go_on = client.engines["numpy"], threading.Event(), threading.Event()

    def prepare(folder: Path) -> Any:
        def exchange() -> None:
            swapping.set()
            go_on.wait(60)
            engine._weights(5, True)

        return exchange

    engine.prepare_weights = prepare
    call = asyncio.create_task(client.server.shared.roster.update_weights("t", spoiled))
    await asyncio.to_thread(swapping.wait, 60)
    call.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await health(client, "t") == health_pb2.HealthCheckResponse.NOT_SERVING  # its old weights are lost


async def test_one_answer_never_mixes_two_sets_of_weights(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start(limits={"max_batch_sequences": 1})
    engine = client.engines["numpy"]
    engine.seconds_per_batch = 0.05
    hashes = [(await client.info()).weights_hash]
    tasks = [asyncio.create_task(client.score(items(3, seed=s), SAMPLED)) for s in range(6)]
    for seed in (1, 2, 3):
        await asyncio.sleep(0.08)
        hashes.append(await client.server.shared.roster.update_weights("t", weights(tmp_path / str(seed), seed)))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(set(hashes)) == 4
    whole = [outcome for outcome in outcomes if isinstance(outcome, list)]
    for outcome in outcomes:
        if not isinstance(outcome, list):
            assert type(error_from_rpc(outcome)) is UnavailableError
    for outcome in whole:
        assert len({scores.weights_hash for scores in outcome}) == 1
    for seed, digest in enumerate(hashes):
        twin = type(engine)(seed=seed)
        for outcome, asked in zip(outcomes, (items(3, seed=s) for s in range(6)), strict=True):
            if isinstance(outcome, list) and outcome[0].weights_hash == digest:
                for item, scores in zip(asked, outcome, strict=True):
                    from teacher_server.engines.base import EngineItem

                    assert (twin._one(EngineItem(item, SAMPLED)).sampled == scores.sampled).all()
    await client.settled()


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

    client.server.shared.roster._factory = Slow
    assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
    await client.server.shared.roster.load("late", "x")
    assert set(seen) == {health_pb2.HealthCheckResponse.NOT_SERVING}
    assert await health(client, "late") == health_pb2.HealthCheckResponse.SERVING
    assert await health(client) == health_pb2.HealthCheckResponse.SERVING


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
    assert await asyncio.wait_for(client.server.wait(), 20) == 20


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
    for _ in range(200):
        if client.engines["numpy"] is not dead and await health(client, "t") == 1:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the engine did not come back")


async def test_a_dead_engine_is_restarted_when_asked(start: Any, items: Any) -> None:
    client = await start(engine={"on_failure": "restart"})
    dead = await kill_engine(client, items)
    await revived(client, dead)
    assert len(await client.score(items(2), SAMPLED)) == 2
    assert dead.closed
    await client.settled()


async def test_an_engine_that_dies_after_a_swap_comes_back_with_the_swapped_weights(
    start: Any, items: Any, tmp_path: Path
) -> None:
    client = await start(engine={"on_failure": "restart"})
    first = (await client.info()).weights_hash
    second = await client.server.shared.roster.update_weights("t", weights(tmp_path / "w", 5))
    assert second != first
    await revived(client, await kill_engine(client, items))
    assert (await client.info()).weights_hash == client.engines["numpy"].info.weights_hash == second
    assert len(await client.score(items(2), SAMPLED)) == 2


@pytest.mark.parametrize("other", ["other weights", "nothing"])
async def test_a_teacher_whose_swapped_weights_are_gone_has_failed_rather_than_answer_with_others(
    start: Any, items: Any, tmp_path: Path, other: str
) -> None:
    client = await start({"t": "numpy", "u": "other"}, engine={"on_failure": "restart"})
    await client.server.shared.roster.update_weights("t", weights(tmp_path / "w", 5))
    if other == "nothing":
        shutil.rmtree(tmp_path / "w")
    else:
        weights(tmp_path / "w", 6)
    await kill_engine(client, items)
    roster = client.server.shared.roster
    for _ in range(200):
        if roster.get("t").state == pb.TEACHER_STATE_FAILED and "weights" in roster.get("t").reason:
            break
        await asyncio.sleep(0.05)
    assert await health(client, "t") == 2
    with pytest.raises(UnavailableError) as caught:
        async with roster.use("t"):
            pass
    assert "is failed" in str(caught.value) and str(tmp_path / "w") in str(caught.value)
    assert len(await client.score(items(1), SAMPLED, teacher="u")) == 1
    # An operator's word brings the model's own weights back.
    await roster.unload("t", 1.0)
    await roster.load("t", "numpy")
    assert len(await client.score(items(1), SAMPLED)) == 1
    await client.settled()


async def test_one_bad_request_does_not_count_as_a_dead_engine(start: Any, items: Any) -> None:
    client = await start()
    engine = client.engines["numpy"]

    def sometimes(batch: Any) -> None:
        if any(entry.item.prompt_length == 5 for entry in batch):
            raise ValueError("odd shape")

    engine.before_score = sometimes
    for _ in range(5):
        with pytest.raises(grpc.RpcError):
            await client.score(items(1, prompt=5), SAMPLED)
        assert len(await client.score(items(1), SAMPLED)) == 1
    assert not engine.closed


async def test_an_engine_that_hangs_ends_the_process(start: Any, items: Any) -> None:
    client = await start(engine={"stall_seconds": 0.2})
    client.engines["numpy"].seconds_per_batch = 3.0
    stuck = asyncio.create_task(client.score(items(1), SAMPLED))
    await asyncio.wait_for(client.server._stop.wait(), 20)
    assert client.server._exit_code == 20
    stuck.cancel()


async def test_admin_calls_are_refused_without_tokens(start: Any) -> None:
    client = await start()
    stub = admin_pb2_grpc.AdminServiceStub(client.channel)
    for call in (
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="x", model="y")),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="t")),
        stub.SleepTeacher(admin.SleepTeacherRequest(teacher="t")),
        stub.WakeTeacher(admin.WakeTeacherRequest(teacher="t")),
        stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="t", folder="/x")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(client.server.shared.roster) == 1


async def test_an_operator_administers_over_the_wire(start: Any, items: Any, tmp_path: Path) -> None:
    client, stub, meta = await operator(start, tmp_path)
    loaded = await stub.LoadTeacher(admin.LoadTeacherRequest(teacher="u", model="m"), metadata=meta)
    assert loaded.teacher.name == "u"
    await stub.SleepTeacher(admin.SleepTeacherRequest(teacher="u"), metadata=meta)
    assert client.engines["m"].asleep
    await stub.WakeTeacher(admin.WakeTeacherRequest(teacher="u"), metadata=meta)
    assert not client.engines["m"].asleep
    folder = weights(tmp_path / "w", 9)
    swapped = await stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="u", folder=str(folder)), metadata=meta)
    assert swapped.weights_hash == client.engines["m"].info.weights_hash
    bad = [
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="a b", model="m"), metadata=meta),
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="v"), metadata=meta),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=-1), metadata=meta),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=float("nan")), metadata=meta),
        stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="u", folder="a\0b"), metadata=meta),
    ]
    for call in bad:
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=1), metadata=meta)
    assert len(client.server.shared.roster) == 1


async def test_each_wait_is_counted_as_the_wait_it_is(start: Any, items: Any) -> None:
    client = await start({"t": "first", "u": "second"})
    client.engines["first"].seconds_per_batch = 0.4
    running = asyncio.create_task(client.score(items(1), SAMPLED, teacher="t"))
    await asyncio.sleep(0.1)
    behind, beside = await asyncio.gather(
        client.score(items(1), SAMPLED, teacher="t"), client.score(items(1), SAMPLED, teacher="u")
    )
    await running
    # The same teacher's engine is busy: it waits in the queue. Another teacher waits for the device, already picked.
    assert behind[0].timings.queue > 0.2 > behind[0].timings.batch_wait
    assert beside[0].timings.batch_wait > 0.2 > beside[0].timings.queue
    assert behind[0].timings.engine >= 0.39
    assert beside[0].timings.engine < 0.2
