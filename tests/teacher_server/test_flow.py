"""Memory and load: slow readers, overload, leaks. What a client does cannot grow the server or starve the others."""

import asyncio
import gc
import os
import time
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest

from opd.errors import DeadlineError, OverloadedError
from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.status import PUSHBACK_KEY, error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc

FULL = PayloadSpec.full()
MIB = 1 << 20


async def test_a_reader_that_does_not_read_holds_back_its_own_work_only(start: Any, items: Any) -> None:
    client = await start(limits={"stream_window_bytes": 4 * MIB, "max_batch_sequences": 4})
    engine = client.engines["numpy"]
    asked = items(60, rows=3000)  # 60 sequences of 1.1 MiB
    before = psutil.Process().memory_info().rss
    call = client.stub.Score(build_score_request(asked, FULL, teacher="t", request_id="r"))
    assert (await call.read()).WhichOneof("message") == "header"
    await asyncio.sleep(1.0)
    # Computed ahead: the window, plus what lies in the transport's own buffers on both sides.
    assert sum(engine.batches) < 40
    sent = client.server.shared.metrics.sent_bytes.labels("t")._value.get()
    assert sent < 30 * MIB
    assert psutil.Process().memory_info().rss - before < 150 * MIB
    assert len(await client.score(items(2), PayloadSpec.sampled(), client="other")) == 2
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += message.WhichOneof("message") == "sequence"
    assert count == 60
    await client.settled()


async def test_a_reader_that_stops_for_good_loses_its_stream_and_gives_back_the_budget(start: Any, items: Any) -> None:
    client = await start(limits={"send_timeout_seconds": 0.3})
    call = client.stub.Score(build_score_request(items(60, rows=3000), FULL, teacher="t", request_id="r"))
    await call.read()
    budget = client.server.shared.budget
    for _ in range(500):
        if budget.closed == 1:
            break
        await asyncio.sleep(0.02)
    assert (budget.closed, budget.used.reply_bytes) == (1, 0)
    with pytest.raises(grpc.RpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert type(error_from_rpc(caught.value)) is DeadlineError
    await client.settled()


async def test_one_sequence_larger_than_the_window_is_still_served(start: Any, items: Any) -> None:
    client = await start(limits={"stream_window_bytes": 1})
    assert len(await client.score(items(3), PayloadSpec.topk(5))) == 3
    await client.settled()


async def overload(client: Any, items: Any, clients: int, seconds: float) -> tuple[int, Counter[str], float]:
    """Closed-loop clients that come back when told; tokens served, outcomes, longest queue wait."""
    outcomes: Counter[str] = Counter()
    served, longest = 0, 0.0
    end = time.monotonic() + seconds

    async def run(number: int) -> None:
        nonlocal served, longest
        n = 0
        while time.monotonic() < end:
            n += 1
            asked = items(4, rows=96, seed=number)
            request = build_score_request(
                asked, PayloadSpec.sampled(), teacher="t", request_id=f"{number}.{n}", client=f"c{number % 8}"
            )
            try:
                trailer = None
                async for message in client.stub.Score(request, timeout=20):
                    if message.WhichOneof("message") == "trailer":
                        trailer = message.trailer
                served += 400
                longest = max(longest, trailer.timings.queue_seconds)
                outcomes["OK"] += 1
            except grpc.RpcError as error:
                typed = error_from_rpc(error)
                outcomes[type(typed).__name__] += 1
                assert isinstance(typed, OverloadedError), typed
                assert dict(error.trailing_metadata())[PUSHBACK_KEY]
                assert typed.usage["budget_tokens"] == 2000
                await asyncio.sleep(typed.retry_after)

    await asyncio.gather(*(run(number) for number in range(clients)))
    return served, outcomes, longest


async def test_at_four_times_the_capacity_goodput_holds_and_every_refusal_is_typed(start: Any, items: Any) -> None:
    client = await start(
        limits={
            "max_tokens_in_flight": 2000,
            "max_request_tokens": 2000,
            "max_batch_tokens": 800,
            "max_client_share": 1.0,
        },
        log={"level": "error"},
    )
    # 800 tokens in 40 ms: a forward that dominates, so that this measures queueing and not this machine.
    client.engines["numpy"].seconds_per_batch = 0.04
    calm, outcomes, _ = await overload(client, items, clients=5, seconds=2.0)
    assert outcomes["OverloadedError"] == 0
    storm, outcomes, longest = await overload(client, items, clients=20, seconds=2.0)
    assert outcomes["OverloadedError"] > 0
    assert set(outcomes) == {"OK", "OverloadedError"}
    # The goal of 95 % is measured by benchmarks/server_overload.py; a busy machine gets room here.
    assert storm >= 0.7 * calm
    # 2,000 tokens in batches of 800 are three batches of wait at most, of 40 ms each; times ten for a busy machine.
    assert longest < 3 * 0.04 * 10
    await client.settled()


async def test_a_request_that_would_be_late_is_turned_away_at_once(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].seconds_per_batch = 0.4
    await client.score(items(15, rows=996), PayloadSpec.sampled())  # 37,500 tokens per second
    running = asyncio.create_task(client.score(items(60, rows=996), PayloadSpec.sampled()))  # 1.6 s of work
    await asyncio.sleep(0.2)
    request = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="r")
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in client.stub.Score(request, timeout=0.5):
            pass
    assert type(error_from_rpc(caught.value)) is OverloadedError
    assert time.monotonic() - started < 0.4
    await running


async def test_a_greedy_client_does_not_starve_a_modest_one(start: Any, items: Any) -> None:
    client = await start(limits={"max_batch_tokens": 400})
    client.engines["numpy"].seconds_per_batch = 0.05
    greedy = [
        asyncio.create_task(client.score(items(20, rows=96, seed=s), PayloadSpec.sampled(), client="greedy"))
        for s in range(4)
    ]
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await client.score(items(1), PayloadSpec.sampled(), client="modest")
    modest = time.monotonic() - started
    await asyncio.gather(*greedy)
    assert modest < 0.5 * (time.monotonic() - started)


def _state() -> tuple[int, int, int]:
    gc.collect()
    tasks = len(asyncio.all_tasks())
    return tasks, len(os.listdir("/proc/self/fd")), len(gc.get_objects())


async def _mixed_calls(client: Any, items: Any, rounds: int) -> None:
    for number in range(rounds):
        await client.score(items(3, rows=20), PayloadSpec.topk(9))
        with pytest.raises(grpc.RpcError):
            await client.score(items(1), PayloadSpec.sampled(), expected_weights_hash="x")
        call = client.stub.Score(build_score_request(items(3), FULL, teacher="t", request_id=f"c{number}"))
        await call.read()
        call.cancel()
        await client.stub.GetLoad(pb.GetLoadRequest())
    await client.settled()


async def test_hundreds_of_calls_leave_tasks_descriptors_and_objects_as_they_were(start: Any, items: Any) -> None:
    client = await start(log={"level": "error"})
    await _mixed_calls(client, items, 40)
    tasks, files, objects = _state()
    await _mixed_calls(client, items, 150)
    tasks_after, files_after, objects_after = _state()
    assert tasks_after <= tasks + 2
    assert files_after <= files + 2
    assert objects_after - objects < 450  # below one object for each of 600 calls


async def test_the_leak_check_finds_a_leak(launch: Any, items: Any) -> None:
    """The negative control: a server that leaks on purpose grows, in a process whose heap no other test has widened."""
    server = launch("--fault", "leak=1000000")
    process = psutil.Process(server.popen.pid)
    async with open_channel(server.address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)

        async def call() -> None:
            stream = stub.Score(build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="r"))
            while await stream.read() is not grpc.aio.EOF:
                pass

        await call()
        before = process.memory_info().rss
        for _ in range(50):
            await call()
    assert process.memory_info().rss - before > 25 * MIB


async def test_health_answers_during_a_long_forward(start: Any, items: Any) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    client = await start()
    client.engines["numpy"].seconds_per_batch = 1.0
    running = asyncio.create_task(client.score(items(1), PayloadSpec.sampled()))
    await asyncio.sleep(0.1)
    stub = health_pb2_grpc.HealthStub(client.channel)
    started = time.monotonic()
    for _ in range(10):
        await stub.Check(health_pb2.HealthCheckRequest())
    assert time.monotonic() - started < 0.8
    assert not running.done()
    await running


async def test_every_watcher_of_health_hears_of_the_drain(start: Any) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    client = await start()
    stub = health_pb2_grpc.HealthStub(client.channel)
    first, second, third = (stub.Watch(health_pb2.HealthCheckRequest(service="t")) for _ in range(3))
    for watch in (first, second, third):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    second.cancel()
    await asyncio.sleep(0.05)
    await client.server.health.drain()
    for watch in (first, third):
        assert (await asyncio.wait_for(watch.read(), 10)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()
