"""New weights in the place of old ones under load: tested first, all or nothing, never two sets in one answer."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from waiting import until

from opd.errors import (
    ConfigError,
    IncompatibleTeacherError,
    NonFiniteError,
    UnavailableError,
)
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import admin_pb2 as admin
from opd.wire.v1 import teacher_pb2 as pb

SAMPLED = PayloadSpec.sampled()


async def test_weights_are_swapped_between_batches_and_the_hash_changes(
    start: Any, items: Any, tmp_path: Path, weights: Any
) -> None:
    client = await start()
    before = (await client.info()).weights_hash
    old = await client.score(items(2), SAMPLED)
    fresh = await client.server.shared.teachers.update_weights("t", weights(tmp_path / "w", 5))
    assert fresh == (await client.info()).weights_hash != before
    new = await client.score(items(2), SAMPLED, expected_weights_hash=fresh)
    assert new[0].weights_hash == fresh
    assert (new[0].sampled != old[0].sampled).any()
    with pytest.raises(grpc.RpcError) as caught:
        await client.score(items(1), SAMPLED, expected_weights_hash=before)
    assert type(error_from_rpc(caught.value)) is IncompatibleTeacherError


async def test_of_two_swaps_that_expect_the_same_weights_one_is_refused(
    start: Any, items: Any, tmp_path: Path, operator: Any, weights: Any
) -> None:
    client, stub, meta = await operator(tmp_path)
    before = (await client.info()).weights_hash

    async def swap(seed: int) -> str:
        folder = str(weights(tmp_path / f"w{seed}", seed))
        request = admin.UpdateWeightsRequest(teacher="t", folder=folder, expected_weights_hash=before)
        return (await stub.UpdateWeights(request, metadata=meta)).weights_hash

    found = await asyncio.gather(swap(5), swap(6), return_exceptions=True)
    (refused,) = [one for one in found if isinstance(one, grpc.RpcError)]
    assert type(error_from_rpc(refused)) is IncompatibleTeacherError
    assert (await client.info()).weights_hash in found


async def test_a_failed_swap_keeps_the_old_weights(start: Any, items: Any, tmp_path: Path) -> None:
    client = await start()
    before = await client.score(items(1), SAMPLED)
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        await client.server.shared.teachers.update_weights("t", tmp_path / "nowhere")
    after = await client.score(items(1), SAMPLED)
    assert (before[0].sampled == after[0].sampled).all()


async def test_weights_that_fail_the_self_test_are_taken_back_before_any_request_meets_them(
    start: Any, items: Any, tmp_path: Path, operator: Any, weights: Any
) -> None:
    client, stub, meta = await operator(tmp_path)
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
    assert await client.health("t") == health_pb2.HealthCheckResponse.SERVING
    healthy = weights(tmp_path / "w", 6)
    answer = await stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="t", folder=str(healthy)), metadata=meta)
    assert answer.weights_hash != before[0].weights_hash


async def test_a_teacher_whose_old_weights_are_lost_stops_serving(
    start: Any, items: Any, tmp_path: Path, weights: Any
) -> None:
    client = await start({"t": "numpy", "u": "other"})
    engine = client.engines["numpy"]
    spoiled = weights(tmp_path / "w", 5)
    (spoiled / "seed").write_text("5 nan")

    def prepare(folder: Path) -> Any:
        def exchange() -> None:
            engine._weights(5, True)

        return exchange

    engine.prepare_weights = prepare
    with pytest.raises(UnavailableError, match=r"failed.*refused.*restored"):
        await client.server.shared.teachers.update_weights("t", spoiled)
    assert await client.health("t") == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError, match="not be restored"):
        await client.score(items(1), SAMPLED)
    with pytest.raises(UnavailableError):
        await client.server.shared.teachers.sleep("t")  # asleep would be as good as serving
    await client.score(items(1), SAMPLED, teacher="u")


async def test_reading_new_weights_holds_up_no_request(start: Any, items: Any, tmp_path: Path, weights: Any) -> None:
    client = await start({"t": "numpy", "u": "other"})
    reading, go_on = threading.Event(), threading.Event()

    def wait(folder: Path) -> None:
        reading.set()
        go_on.wait(120)

    client.engines["numpy"].before_prepare = wait
    swap = asyncio.create_task(client.server.shared.teachers.update_weights("t", weights(tmp_path / "w", 5)))
    try:
        await asyncio.to_thread(reading.wait, 120)
        for teacher in "tu":
            await asyncio.wait_for(client.score(items(2), SAMPLED, teacher=teacher), 120)
        assert not swap.done()
    finally:
        go_on.set()
    assert await swap == (await client.info()).weights_hash


async def test_a_swap_whose_caller_leaves_is_finished_and_told(
    start: Any, tmp_path: Path, weights: Any, cancel_midway: Any
) -> None:
    client = await start()
    spoiled = weights(tmp_path / "w", 5)
    (spoiled / "seed").write_text("5 nan")
    engine, swapping, go_on = client.engines["numpy"], threading.Event(), threading.Event()

    def prepare(folder: Path) -> Any:
        def exchange() -> None:
            swapping.set()
            go_on.wait(120)
            engine._weights(5, True)

        return exchange

    engine.prepare_weights = prepare
    call = asyncio.create_task(client.server.shared.teachers.update_weights("t", spoiled))
    await cancel_midway(call, swapping, go_on)
    assert await client.health("t") == health_pb2.HealthCheckResponse.NOT_SERVING  # its old weights are lost


async def test_one_answer_never_mixes_two_sets_of_weights(start: Any, items: Any, tmp_path: Path, weights: Any) -> None:
    client = await start(limits={"max_batch_sequences": 1})
    engine = client.engines["numpy"]
    engine.seconds_per_batch = 0.05
    hashes = [(await client.info()).weights_hash]
    tasks = [asyncio.create_task(client.score(items(3, seed=s), SAMPLED)) for s in range(6)]
    for seed in (1, 2, 3):
        ran = len(engine.batches)
        await until(lambda ran=ran: len(engine.batches) > ran or all(task.done() for task in tasks))  # type: ignore[misc]
        hashes.append(await client.server.shared.teachers.update_weights("t", weights(tmp_path / str(seed), seed)))
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
