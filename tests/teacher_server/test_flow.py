"""Memory and load: slow readers, overload, leaks. What a client does cannot grow the server or starve the others."""

import asyncio
import gc
import os
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import EngineGate, until

from opd.errors import DeadlineError, OverloadedError
from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.status import PUSHBACK_KEY, error_from_rpc
from opd.wire.types import PayloadKind, PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from teacher_server.calls import score_call
from teacher_server.calls.score_call import SEQUENCE_BYTES

FULL = PayloadSpec.full()
MIB = 1 << 20


async def test_a_reader_that_does_not_read_holds_back_its_own_work_only(start: Any, items: Any) -> None:
    client = await start(limits={"stream_window_bytes": 4 * MIB, "max_batch_sequences": 4})
    engine = client.engines["numpy"]
    asked = items(60, rows=3000)  # 60 sequences of 1.1 MiB
    before = psutil.Process().memory_info().rss
    computed = 0

    def count(batch: Any) -> None:
        nonlocal computed
        computed += sum(entry.spec.kind is PayloadKind.FULL for entry in batch)

    engine.before_score = count
    call = client.stub.Score(build_score_request(asked, FULL, teacher="t", request_id="r"))
    assert (await call.read()).WhichOneof("message") == "header"
    # The engine has turns for others, one after the other, and takes none of them for what is held back.
    for _ in range(50):
        assert len(await client.score(items(2), PayloadSpec.sampled(), client="other")) == 2
    # Computed ahead: the window, plus what lies in the transport's own buffers on both sides.
    assert 0 < computed < 40
    sent = client.server.shared.metrics.sent_bytes.labels("t")._value.get()
    assert sent < 30 * MIB
    assert psutil.Process().memory_info().rss - before < 150 * MIB
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += message.WhichOneof("message") == "sequence"
    assert count == 60
    await client.settled()


async def test_a_reader_that_stops_for_good_loses_its_stream_and_gives_back_the_budget(start: Any, items: Any) -> None:
    client = await start(limits={"send_timeout_seconds": 0.3})
    call = client.stub.Score(build_score_request(items(60, rows=3000), FULL, teacher="t", request_id="r"))
    budget = client.server.shared.budget
    await until(lambda: budget.closed == 1)
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


async def overload(client: Any, items: Any, clients: int, calls: int) -> Counter[str]:
    """Clients that come back when told, until each was served `calls` times; how often what happened."""
    outcomes: Counter[str] = Counter()

    async def run(number: int) -> None:
        served = n = 0
        while served < calls:
            n += 1
            asked = items(4, rows=96, seed=number)
            request = build_score_request(
                asked, PayloadSpec.sampled(), teacher="t", request_id=f"{number}.{n}", client=f"c{number % 8}"
            )
            try:
                async for _ in client.stub.Score(request, timeout=300):
                    pass
                served += 1
                outcomes["OK"] += 1
            except grpc.RpcError as error:
                typed = error_from_rpc(error)
                outcomes[type(typed).__name__] += 1
                assert isinstance(typed, OverloadedError), typed
                assert dict(error.trailing_metadata())[PUSHBACK_KEY]
                assert typed.usage["budget_tokens"] == 2000
                await asyncio.sleep(typed.retry_after)

    await asyncio.gather(*(run(number) for number in range(clients)))
    return outcomes


async def test_at_four_times_the_capacity_no_work_is_lost_and_every_refusal_is_typed(start: Any, items: Any) -> None:
    """What the server promises of goodput without a clock; benchmarks/server_overload.py measures it in tokens/s."""
    client = await start(
        limits={
            "max_tokens_in_flight": 2000,
            "max_request_tokens": 2000,
            "max_batch_tokens": 800,
            "max_client_share": 1.0,
        },
        log={"level": "error"},
    )
    engine, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    most = 0

    def look(batch: Any) -> None:
        nonlocal most
        most = max(most, sum(worker.load()[1:]))

    engine.before_score, engine.seconds_per_batch = look, 0.01
    await client.score(items(1), PayloadSpec.sampled())
    calm = await overload(client, items, clients=5, calls=8)
    assert set(calm) == {"OK"}
    engine.batches.clear()
    storm = await overload(client, items, clients=20, calls=8)
    assert set(storm) == {"OK", "OverloadedError"}
    # Nothing is computed that is not delivered, and no request waits behind more than the budget: three batches.
    assert storm["OK"] == 160 and sum(engine.batches) == 4 * 160
    assert most <= 2000
    await client.settled()


async def test_a_request_without_room_is_refused_before_its_ids_are_unpacked(
    start: Any, items: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start(limits={"max_reply_bytes_in_flight": 75_000, "max_client_share": 1.0})
    gathered, spec = items(2, rows=100, k=20), PayloadSpec.gather(20)
    client.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(client.score(gathered, spec))
    await until(lambda: gate.held)
    # Twice 104 token ids and 100 x 20 ids to gather, of 4 bytes; and as many values of 2 bytes with 16 more for a row.
    reply = 100 * (20 * 2 + 16)
    held = 2 * 4 * (104 + 100 * 20) + 2 * (reply + SEQUENCE_BYTES)
    # And a chunk, here a whole reply, as a message and in the transport.
    held += 2 * reply
    assert client.server.shared.budget.used.reply_bytes == held

    def unpack(*_: Any) -> Any:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr(score_call, "parse_score_request", unpack)
    message = build_score_request(items(3, rows=100, k=20), spec, teacher="t", request_id="r")
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in client.stub.Score(message):
            pass
    typed = error_from_rpc(caught.value)
    assert isinstance(typed, OverloadedError)
    # In full: the message itself is held beside its ids until these are unpacked.
    assert typed.usage["request_bytes"] == (held - 2 * reply) * 3 // 2 + 2 * reply + message.ByteSize()
    gate.open()
    await running
    await client.settled()


async def test_a_request_that_would_be_late_is_turned_away_at_once(start: Any, items: Any) -> None:
    client = await start(limits={"max_batch_sequences": 1})
    engine = client.engines["numpy"]
    engine.seconds_per_batch = 0.4
    await client.score(items(1, rows=96), PayloadSpec.sampled())  # a full batch: 250 tokens per second at most
    engine.seconds_per_batch, engine.before_score = 0.0, (gate := EngineGate())
    running = asyncio.create_task(client.score(items(2, rows=7996), PayloadSpec.sampled()))  # 32 seconds each
    await until(lambda: gate.held)
    request = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="r")
    with pytest.raises(grpc.RpcError) as caught:  # while nothing leaves the engine
        async for _ in client.stub.Score(request, timeout=20):
            pass
    assert type(error_from_rpc(caught.value)) is OverloadedError
    gate.open()
    await running


async def test_a_deadline_is_judged_by_what_comes_before_and_not_by_all_that_waits(start: Any, items: Any) -> None:
    client = await start(limits={"max_batch_tokens": 1000})
    engine, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    engine.seconds_per_batch = 0.4
    await client.score(items(1, rows=96), PayloadSpec.sampled())  # 250 tokens per second at most
    engine.seconds_per_batch, engine.before_score = 0.0, (gate := EngineGate())
    flood = asyncio.create_task(client.score(items(60, rows=996), PayloadSpec.sampled(), client="greedy"))
    await until(lambda: gate.held and sum(worker.load()[1:]) == 60 * 1000)  # four minutes of work
    modest = asyncio.create_task(client.score(items(1), PayloadSpec.sampled(), client="modest", timeout=60))
    await until(lambda: modest.done() or sum(worker.load()[1:]) > 60 * 1000)
    gate.open()
    assert len(await modest) == 1
    await flood


async def test_a_greedy_client_does_not_starve_a_modest_one(start: Any, items: Any) -> None:
    client = await start(limits={"max_batch_tokens": 400})
    engine, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    gate, modest, found = EngineGate(), items(1), []

    def look(batch: Any) -> None:
        found.append(any(entry.item.response_length == modest[0].response_length for entry in batch))
        gate(batch)

    engine.before_score = look
    calls = [
        asyncio.create_task(client.score(items(20, rows=96, seed=s), PayloadSpec.sampled(), client="greedy"))
        for s in range(4)
    ]
    await until(lambda: gate.held and sum(worker.load()[1:]) == 80 * 100)
    calls.append(asyncio.create_task(client.score(modest, PayloadSpec.sampled(), client="modest")))
    await until(lambda: sum(worker.load()[1:]) > 80 * 100)
    gate.open()
    await asyncio.gather(*calls)
    # It came last, behind 19 batches: it is in the one after that which ran.
    assert found.index(True) == 1 and len(found) >= 20


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
    await _mixed_calls(client, items, 20)
    tasks, files, objects = _state()
    await _mixed_calls(client, items, 75)

    def back() -> bool:  # what the transport still winds up is gone soon
        after = _state()
        # Below one object for each of 300 calls.
        return after[0] <= tasks + 2 and after[1] <= files + 2 and after[2] - objects < 225

    await until(back)


async def test_the_leak_check_finds_a_leak(launch: Any, items: Any) -> None:
    """The negative control: a server that leaks on purpose grows, in a process whose heap no other test has widened."""
    server = launch("--engine-option", "leak=1000000")
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
    client = await start()
    client.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(client.score(items(1), PayloadSpec.sampled()))
    await until(lambda: gate.held)
    stub = health_pb2_grpc.HealthStub(client.channel)
    for _ in range(10):
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert not running.done()
    gate.open()
    await running


async def test_every_watcher_of_health_hears_of_the_drain(start: Any) -> None:
    client = await start()
    stub = health_pb2_grpc.HealthStub(client.channel)
    first, second, third = (stub.Watch(health_pb2.HealthCheckRequest(service="t")) for _ in range(3))
    for watch in (first, second, third):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    second.cancel()
    await until(lambda: client.server._gate.watches.used == 2)
    await client.server.health.drain()
    for watch in (first, third):
        assert (await asyncio.wait_for(watch.read(), 120)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()
