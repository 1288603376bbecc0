"""Callers who mean harm, against a real server process: they take no places, no memory and no time from the others."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opd.errors import InvalidRequestError
from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from support.http2 import Http2Connection, grpc_message

MIB = 1 << 20
SCORE = "/opd.wire.v1.TeacherService/Score"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
SECRETS = {"student": "student-secret-1", "other": "other-secret-1234"}
BEARER = {name: {"authorization": f"Bearer {secret}"} for name, secret in SECRETS.items()}


def metadata(name: str = "student") -> tuple[tuple[str, str], ...]:
    return tuple(BEARER[name].items())


@pytest.fixture
def serve(launch: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`serve(config)` runs a server with a token for "student" and one for "other"."""

    def run(config: str = "", *flags: str) -> Any:
        tokens, settings = tmp_path / "tokens.yaml", tmp_path / "server.yaml"
        tokens.write_text("".join(f"- {{name: {name}, token: {secret}}}\n" for name, secret in SECRETS.items()))
        settings.write_text(config)
        return launch("--tokens", str(tokens), "--config", str(settings), *flags)

    return run


@pytest.fixture
def connect() -> Iterator[Callable[[str], Http2Connection]]:
    """`connect(address)` opens a bare HTTP/2 connection; all are closed at the end."""
    connections: list[Http2Connection] = []

    def run(address: str) -> Http2Connection:
        connections.append(Http2Connection(address))
        connections[-1].settle()
        return connections[-1]

    yield run
    for connection in connections:
        connection.close()


async def good_calls(address: str, items: Any, count: int = 20, name: str = "student") -> Counter[str]:
    """How `count` calls at once end: "OK", or the status."""
    async with open_channel(address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)

        async def one(number: int) -> str:
            message = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id=f"r{number}")
            try:
                messages = [m async for m in stub.Score(message, timeout=240, metadata=metadata(name))]
                return "OK" if messages else "nothing"
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"

        return Counter(await asyncio.gather(*(one(number) for number in range(count))))


def resident(process: Any) -> int:
    return int(psutil.Process(process.popen.pid).memory_info().rss)


def refused(process: Any, reason: str) -> float:
    """The series of refused calls, from /metrics."""
    import urllib.request

    page = urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=120).read().decode()
    name = f'opd_teacher_refused_calls_total{{reason="{reason}"}} '
    return next((float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name)), 0.0)


@pytest.mark.parametrize("kind", ["watch", "silent", "half-closed"])
def test_callers_without_a_token_take_no_place_from_callers_with_one(
    kind: str, serve: Callable[..., Any], connect: Callable[..., Http2Connection], items: Any
) -> None:
    process = serve("calls: {receive_seconds: 240}")  # a busy machine may hold a good call's message up for long
    for _ in range(12):
        connection = connect(process.address)
        for _ in range(100):
            stream = connection.open(WATCH if kind == "watch" else SCORE, half_close=kind == "half-closed")
            if kind == "watch":
                connection.send(stream, b"\0\0\0\0\0")
        connection.settle()
    assert asyncio.run(good_calls(process.address, items)) == {"OK": 20}


def test_a_score_without_a_token_is_ended_at_its_headers(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection]
) -> None:
    process = serve()
    connection = connect(process.address)
    streams = [connection.open(SCORE) for _ in range(20)]  # no message ever follows
    connection.wait_until_ended(streams)


def test_one_token_cannot_take_every_place(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection], items: Any
) -> None:
    process = serve("calls: {max_calls: 40, receive_seconds: 60}")
    connection = connect(process.address)
    streams = [connection.open(SCORE, BEARER["student"]) for _ in range(60)]
    connection.wait_until_ended(streams, count=40)  # whichever: calls need not begin in the order that they came in
    assert len(connection.ended.intersection(streams)) == 40
    assert asyncio.run(good_calls(process.address, items, count=10, name="other")) == {"OK": 10}
    assert refused(process, "caller_full") == 40


def test_a_request_that_never_comes_is_given_up(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection]
) -> None:
    process = serve("calls: {receive_seconds: 0.5}")
    connection = connect(process.address)
    streams = [connection.open(SCORE, BEARER["student"]) for _ in range(2)]
    connection.send(streams[1], grpc_message(30 * MIB))
    connection.wait_until_ended(streams)
    assert refused(process, "receive_timeout") == 2


def test_a_call_that_ends_without_a_message_is_refused_at_once(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection]
) -> None:
    process = serve("calls: {receive_seconds: 600}")
    connection = connect(process.address)
    connection.wait_until_ended([connection.open(SCORE, BEARER["student"], half_close=True) for _ in range(20)])


def test_one_connection_holds_a_bounded_number_of_streams(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection]
) -> None:
    process = serve("calls: {max_streams_per_connection: 10}")
    connection = connect(process.address)
    assert connection.max_streams == 10
    streams = [connection.open(SCORE, BEARER["student"]) for _ in range(15)]
    connection.wait_until_ended(streams[10:])
    assert connection.ended.isdisjoint(streams[:10])


def test_watches_without_a_token_are_few_and_leave_checks_alone(serve: Callable[..., Any]) -> None:
    process = serve("calls: {max_watches: 8}")

    async def run() -> None:
        async with open_channel(process.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            watches = [stub.Watch(request) for _ in range(2)]  # a quarter of them per address
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Watch(request).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Check(request, timeout=120)).status == health_pb2.HealthCheckResponse.SERVING
            mine = stub.Watch(request, metadata=metadata())  # a token's watch counts among its own calls
            assert (await mine.read()).status == health_pb2.HealthCheckResponse.SERVING
            for watch in (*watches, mine):
                watch.cancel()

    asyncio.run(run())


def test_a_watch_ends_after_its_time_and_may_be_taken_up_again(serve: Callable[..., Any]) -> None:
    process = serve("calls: {watch_seconds: 1.0}")

    async def run() -> None:
        async with open_channel(process.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(2):
                watch = stub.Watch(health_pb2.HealthCheckRequest())
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                assert await watch.read() is grpc.aio.EOF
                assert await watch.code() is grpc.StatusCode.OK

    asyncio.run(run())


def test_callers_without_a_token_that_stop_in_mid_message_cost_next_to_nothing(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection], items: Any
) -> None:
    process = serve()
    before = resident(process)
    held = 0
    for _ in range(30):
        connection = connect(process.address)
        held += connection.send(connection.open(SCORE), grpc_message(30 * MIB))
    assert resident(process) - before < 64 * MIB, f"{held / MIB:.0f} MiB were taken"
    assert asyncio.run(good_calls(process.address, items)) == {"OK": 20}


def test_health_calls_that_stop_in_mid_message_hold_four_messages_at_most(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection], items: Any
) -> None:
    process = serve("calls: {receive_seconds: 60}")
    before = resident(process)
    for _ in range(20):
        connection = connect(process.address)
        connection.send(connection.open(CHECK), grpc_message(30 * MIB), patience=0.1)
    assert resident(process) - before < (4 * 32 + 64) * MIB
    assert asyncio.run(good_calls(process.address, items)) == {"OK": 20}


def test_callers_with_a_token_that_stop_in_mid_message_stay_within_the_receive_budget(
    serve: Callable[..., Any], connect: Callable[..., Http2Connection], items: Any
) -> None:
    process = serve(f"calls: {{receive_budget_bytes: {256 * MIB}, receive_seconds: 3}}")
    before = resident(process)
    for _ in range(20):
        connection = connect(process.address)
        connection.send(connection.open(SCORE, BEARER["student"]), grpc_message(30 * MIB), patience=0.1)
    assert resident(process) - before < (64 + 64) * MIB  # a quarter of the budget per caller
    assert asyncio.run(good_calls(process.address, items, name="other")) == {"OK": 20}


@pytest.mark.parametrize("token", [False, True], ids=["without a token", "with a token"])
def test_compressed_requests_are_refused_and_never_unpacked(serve: Callable[..., Any], token: bool) -> None:
    process = serve()
    before = resident(process)

    async def run() -> grpc.StatusCode:
        async with open_channel(process.address) as channel:
            call = channel.unary_stream(SCORE)(
                bytes(31 * MIB), compression=grpc.Compression.Gzip, metadata=metadata() if token else None, timeout=120
            )
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            return caught.value.code()

    codes = {asyncio.run(run()) for _ in range(3)}
    assert codes <= {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    assert resident(process) - before < 24 * MIB


def many_sequences(count: int) -> bytes:
    """A Score request of empty sequences: two bytes each on the wire, eighty in memory."""
    return b"\x0a\x01r\x12\x01t" + b"\x1a\x00" * count


@pytest.mark.parametrize("field", ["sequences", "payload"])
def test_a_message_of_millions_of_fields_is_refused_before_it_is_parsed(serve: Callable[..., Any], field: str) -> None:
    process = serve()
    empty = many_sequences(15 * MIB) if field == "sequences" else b"\x22\x00\x2a\x00" * (7 * MIB)
    peak_before = peak(process)

    async def run() -> list[Any]:
        async with open_channel(process.address) as channel:
            calls = [channel.unary_stream(SCORE)(empty, metadata=metadata(), timeout=120).read() for _ in range(3)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            return [error_from_rpc(outcome) for outcome in outcomes]

    before = processor_seconds(process)
    errors = asyncio.run(run())
    spent = processor_seconds(process) - before
    for error in errors:
        assert type(error) is InvalidRequestError
        assert "fields" in str(error)
    assert peak(process) - peak_before < 300 * MIB  # three messages of 30 MiB, copied once by the transport
    assert spent < 3 * parse_seconds(empty), "they were parsed, on the loop that all others wait for"
    assert refused(process, "fields") == 3


def parse_seconds(message: bytes) -> float:
    """Processor time that it takes to parse a message, from a tenth of it."""
    started = time.process_time()
    pb.ScoreRequest.FromString(message[: 6 + (len(message) - 6) // 40 * 4])
    return 10 * (time.process_time() - started)


def processor_seconds(process: Any) -> float:
    times = psutil.Process(process.popen.pid).cpu_times()
    return float(times.user + times.system)


def peak(process: Any) -> int:
    """Highest resident memory so far, bytes."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_large_request_that_is_honest_is_served(serve: Callable[..., Any], items: Any) -> None:
    process = serve()
    asked = items(250, prompt=10, rows=600, k=40)

    async def run() -> int:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            message = build_score_request(asked, PayloadSpec.gather(40), teacher="t", request_id="r")
            assert message.ByteSize() > 10 * MIB
            answers = [m async for m in stub.Score(message, timeout=120, metadata=metadata())]
            return int(answers[-1].trailer.scored_tokens)

    assert asyncio.run(run()) == 250 * 600
