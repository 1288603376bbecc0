"""However a call ends, what it held is freed at once, not by a garbage collection; a caller that leaves is no error."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import grpc
import numpy as np
import pytest
from faults import POINTS
from prometheus_client import generate_latest
from waiting import EngineGate, until

from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.queue import SequenceJob
from teacher_server.calls.score_call import ScoreCall
from teacher_server.engines.base import EngineItem

HELD = (pb.ScoreRequest, ScoreItem, Scores, EngineItem, SequenceJob, ScoreCall, np.ndarray, FrameType, TracebackType)


@pytest.fixture
def garbage() -> Iterator[Callable[[], Counter[str]]]:
    """`garbage()` counts what calls held and only a collection can free; there is none in the meantime."""
    gc.collect()
    gc.freeze()  # what was there before is looked through neither at every count, nor in any later test
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> Counter[str]:
        gc.collect()
        mine = [one for one in gc.garbage if isinstance(one, HELD) and not _of_others(one)]
        gc.garbage.clear()
        return Counter(f"{type(one).__name__} {one if isinstance(one, FrameType) else ''}" for one in mine)

    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def _of_others(found: object) -> bool:
    """Whether a frame or traceback is not the server's: the client's lie in the same process."""
    frame = found.tb_frame if isinstance(found, TracebackType) else found
    return isinstance(frame, FrameType) and "/teacher_server/" not in frame.f_code.co_filename.replace("/tests/", "")


async def ended(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("answered", grpc.StatusCode.OK),
        ("overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("invalid", grpc.StatusCode.INVALID_ARGUMENT),
        ("other weights", grpc.StatusCode.FAILED_PRECONDITION),
        ("engine fails", grpc.StatusCode.UNAVAILABLE),
        ("unexpected", grpc.StatusCode.UNKNOWN),
    ],
)
async def test_what_a_call_held_is_freed_without_a_collection(
    ending: str, code: grpc.StatusCode, start: Any, items: Any, garbage: Callable[[], Counter[str]]
) -> None:
    limits = {"max_tokens_in_flight": 100, "max_client_share": 1.0} if ending == "overloaded" else {}
    client = await start(limits=limits, log={"level": "error"})
    await client.score(items(1, k=9), PayloadSpec.gather(9))  # imports torch, which leaves garbage
    engine, gate = client.engines["numpy"], EngineGate()
    running = None
    if ending == "overloaded":
        engine.before_score = gate
        running = asyncio.create_task(client.score(items(1, rows=90), PayloadSpec.sampled()))
        await until(lambda: gate.held)
    elif ending == "engine fails":

        def fail(batch: Any) -> None:
            raise ValueError("no")

        engine.before_score = fail
    elif ending == "unexpected":

        async def stop() -> None:
            raise RuntimeError("no")

        client.server.points.set("encoded", stop)
    asked = items(2, rows=20, k=9)
    if ending == "invalid":
        asked = [ScoreItem(np.full(24, 999, np.uint32), 4, one.gather_ids) for one in asked]
    message = build_score_request(
        asked, PayloadSpec.gather(9), teacher="t", request_id="r",
        expected_weights_hash="x" if ending == "other weights" else "",
    )  # fmt: skip
    garbage()
    for _ in range(2):
        assert await ended(client.stub.Score(message)) is code
    await asyncio.sleep(0)
    assert garbage() == {}
    gate.open()
    if running is not None:
        await running


@pytest.mark.parametrize("point", ["admitted", "queued", "result_ready", "encoded", "chunk_sent"])
async def test_what_a_call_held_is_freed_when_its_caller_leaves(
    point: str, start: Any, items: Any, garbage: Callable[[], Counter[str]]
) -> None:
    client = await start(log={"level": "error"})
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stop() -> None:
        reached.set()
        await go_on.wait()

    client.server.points.set(point, stop)
    message = build_score_request(items(2, rows=20, k=9), PayloadSpec.gather(9), teacher="t", request_id="r")
    garbage()
    call = client.stub.Score(message)
    reading = asyncio.create_task(ended(call))
    await reached.wait()
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.settled()
    del reading, call
    await until(lambda: not garbage() or pytest.fail("garbage"))


@pytest.mark.parametrize("point", [point for point in POINTS if not point.startswith("engine")])
async def test_a_caller_that_has_left_before_the_server_is_told_is_not_an_unexpected_error(
    point: str, start: Any, items: Any, log_text: Callable[[], str]
) -> None:
    """A read or write of grpcio that fails because the caller has left raises this, at whatever moment."""
    client = await start()

    async def gone() -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    client.server.points.set(point, gone)
    call = client.stub.Score(build_score_request(items(2), PayloadSpec.topk(9), teacher="t", request_id="r"))
    reading = asyncio.create_task(ended(call))
    await until(lambda: client.server.shared.budget.closed == 1 and client.server._gate.authorised.used == 0)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.settled()  # which looks for unexpected errors too
    levels = {entry["level"] for entry in map(json.loads, log_text().splitlines())}
    assert levels <= {"debug", "info"}
    assert 'code="CANCELLED"' in generate_latest(client.server.shared.metrics.registry).decode()
