"""Cancellation, deadline and shutdown at every named point of a call: all is released, exactly once."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from faults import POINTS
from waiting import EngineGate, until, wait_until

from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec

TOPK = PayloadSpec.topk(20)


class Gate:
    """Stops the server at a point until it is opened; knows when the point was reached."""

    def __init__(self, client: Any, point: str) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._open_sync = threading.Event()
        faults = client.server.points
        if point.startswith("engine"):
            faults.set_sync(point, self._stop_sync)
        else:
            faults.set(point, self._stop)

    async def _stop(self) -> None:
        self.reached.set()
        await self._open.wait()

    def _stop_sync(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        self._open_sync.wait(120)

    def open(self) -> None:
        self._open.set()
        self._open_sync.set()


async def read_all(call: Any) -> int:
    count = 0
    async for _ in call:
        count += 1
    return count


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("ending", ["cancel", "deadline", "shutdown"])
async def test_a_call_that_ends_at_any_point_releases_everything_once(
    ending: str, point: str, start: Any, items: Any
) -> None:
    client = await start(engine={"self_test": False})
    gate = Gate(client, point)
    message = build_score_request(items(3), TOPK, teacher="t", request_id="r")
    attempts = 0
    while not gate.reached.is_set():  # on a busy machine a short deadline passes before the point is reached
        attempts += 1
        call = client.stub.Score(message, timeout=0.3 * 2**attempts if ending == "deadline" else 300)
        reading = asyncio.create_task(read_all(call))
        await until(lambda reading=reading: gate.reached.is_set() or reading.done())  # type: ignore[misc]
    if ending == "cancel":
        call.cancel()
    if ending == "shutdown":
        stopping = asyncio.create_task(client.server._server.stop(0))
        await asyncio.wait({reading})  # the stop has cut it
        gate.open()
        await stopping
    outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
    gate.open()
    if point != "after_trailer":
        assert isinstance(outcome, grpc.RpcError | asyncio.CancelledError)
    await client.settled()
    budget = client.server.shared.budget
    assert budget.opened == budget.closed <= attempts
    client.server.points.clear()
    if ending != "shutdown":
        assert len(await client.score(items(2), TOPK)) == 2
        await client.settled()


async def test_what_waits_in_the_queue_never_reaches_the_engine_after_cancellation(start: Any, items: Any) -> None:
    client = await start(engine={"self_test": False}, limits={"max_batch_sequences": 1})
    engine = client.engines["numpy"]
    engine.before_score = gate = EngineGate()
    calls = [
        client.stub.Score(build_score_request(items(3, seed=n), TOPK, teacher="t", request_id=f"r{n}"))
        for n in range(5)
    ]
    readers = [asyncio.create_task(read_all(call)) for call in calls]
    worker = client.server.shared.teachers.get("t").worker
    await until(lambda: gate.held == 1 and worker.load()[0] == 14)
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await until(lambda: worker.load()[0] == 0)
    gate.open()
    await client.settled()
    assert len(await client.score(items(1), TOPK)) == 1  # behind all that had waited
    assert len(engine.batches) == 2


async def test_running_work_is_skipped_within_one_engine_step(start: Any, items: Any) -> None:
    client = await start(engine={"self_test": False})
    seen: list[bool] = []
    entered = threading.Event()

    def slow(batch: Any) -> None:
        entered.set()
        wait_until(lambda: all(entry.cancelled() for entry in batch))
        seen.extend(entry.cancelled() for entry in batch)

    client.engines["numpy"].before_score = slow
    call = client.stub.Score(build_score_request(items(2), TOPK, teacher="t", request_id="r"))
    reading = asyncio.create_task(read_all(call))
    await asyncio.to_thread(entered.wait, 120)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.settled()
    await until(lambda: seen)
    assert seen == [True, True]


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_cancellations_leaves_nothing(seed: int, start: Any, items: Any) -> None:
    import random

    client = await start(engine={"self_test": False})
    rng = random.Random(seed)
    client.engines["numpy"].seconds_per_batch = 0.002

    async def one(number: int) -> None:
        rows = rng.randint(1, 400)
        message = build_score_request(items(rng.randint(1, 6), rows=rows), TOPK, teacher="t", request_id=f"r{number}")
        call = client.stub.Score(message, timeout=rng.choice([0.005, 0.02, 5.0]))
        reading = asyncio.create_task(read_all(call))
        await asyncio.sleep(rng.random() * 0.03)
        if rng.random() < 0.6:
            call.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(60)))
    await client.settled()
    assert len(await client.score(items(1), TOPK)) == 1
