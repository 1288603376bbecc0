"""Hostile input: no request crashes the server or ends in INTERNAL or UNKNOWN, no answer poisons the client.

`make fuzz` runs at least 10,000 cases (OPD_FUZZ_CASES); the suite runs a few dozen.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from opd.errors import CorruptPayloadError
from opd.wire.bounds import RequestBounds
from opd.wire.checksum import crc32c
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.head import HeadStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.server import TeacherServer
from teacher_server.settings import ServerSettings

CASES = int(os.environ.get("OPD_FUZZ_CASES", "60"))
FUZZ = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
FEWER = settings(FUZZ, max_examples=max(50, CASES // 4))
VOCAB = 97
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


class Live:
    """A server on a loop of its own, and a blocking raw channel to it."""

    def __init__(self, engine: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.run(self._start(engine))
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}")

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def _start(self, engine: Any) -> None:
        limits = {"max_sequence_tokens": 64, "max_request_bytes": 20_000, "max_sequences": 5, "allow_full": True}
        log = {"level": "error"}
        self.server = TeacherServer(ServerSettings(metrics_port=-1, limits=limits, log=log), lambda model: engine)
        await self.server.start({"t": "numpy"})

    def status(self, method: str, data: bytes, service: str = "opd.wire.v1.TeacherService") -> grpc.StatusCode:
        """The status of a raw call; both kinds of method are called as streams of answers."""
        call = self.channel.unary_stream(f"/{service}/{method}")(data, timeout=120)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error.code()
        return call.code()

    def sound(self) -> None:
        """Nothing leaked, nothing unexpected."""
        shared = self.server.shared
        wait_until(lambda: shared.budget.opened == shared.budget.closed)
        assert shared.budget.used.tokens == 0
        assert shared.metrics.unexpected_errors._value.get() == 0
        assert self.status("GetLoad", b"") is grpc.StatusCode.OK

    def close(self) -> None:
        self.channel.close()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    import importlib.util
    from pathlib import Path

    spec: Any = importlib.util.spec_from_file_location(
        "numpy_teacher_fuzz", Path(__file__).with_name("numpy_teacher.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    running = Live(module.NumpyEngine("numpy"))
    yield running
    running.sound()
    running.close()


edges = st.sampled_from([0, 1, 2, 3, 5, 17, 64, 97, 98, 255, 65535, 65536, 262143, 262144, 2**31 - 1, 2**31, 2**32 - 1])
names = st.sampled_from(["t", "u", "", "x" * 129, "é" * 10, "a b", "../../etc", "t\0"]) | st.text(max_size=5)
floats = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.01, 100.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")])
dtypes = st.integers(0, 8) | edges.filter(lambda n: n < 2**31)


def words(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


token_bytes = (
    st.binary(max_size=40)
    | st.lists(st.integers(0, VOCAB - 1), max_size=30).map(words)
    | st.lists(edges, max_size=8).map(words)
)


@st.composite
def sequences(draw: Any) -> pb.Sequence:
    message = pb.Sequence(
        token_ids=draw(token_bytes),
        prompt_length=draw(st.integers(0, 5) | edges),
        gather_ids=draw(st.just(b"") | token_bytes),
        gather_ids_dtype=draw(dtypes),
    )
    if draw(st.booleans()):
        message.crc32c = draw(edges | st.just(crc32c(message.gather_ids, crc32c(message.token_ids))))
    return message


@st.composite
def requests(draw: Any) -> bytes:
    message = pb.ScoreRequest(
        request_id=draw(st.just("r") | names),
        teacher=draw(st.sampled_from(["t", "t", "t", "t", "t", "u"]) | names),
        sequences=draw(st.lists(sequences(), max_size=6)),
        temperature=draw(st.just(0.0) | floats),
        expected_weights_hash=draw(st.just("") | st.text(max_size=5)),
        accept_zstd=draw(st.booleans()),
        accept_batches=draw(st.booleans()),
        chunk_bytes=draw(st.just(0) | edges),
        client=draw(st.just("") | names),
    )
    kind = draw(st.sampled_from(["sampled", "topk", "gather", "hidden", "full", "none"]))
    if kind in ("topk", "gather"):
        getattr(message, kind).k = draw(st.integers(0, 6) | edges)
        getattr(message, kind).value_dtype = draw(dtypes)
    elif kind == "hidden":
        message.hidden.value_dtype = draw(dtypes)
    elif kind != "none":
        getattr(message, kind).SetInParent()
    return message.SerializeToString()


@st.composite
def good_requests(draw: Any) -> bytes:
    """Requests that ought to succeed, before something is bent."""
    kind = draw(st.sampled_from(list(PayloadKind)))
    k = draw(st.integers(1, 6)) if kind in (PayloadKind.TOPK, PayloadKind.GATHER) else 0
    spec = PayloadSpec(kind, k, "bf16" if kind is PayloadKind.HIDDEN else "f16")
    items = []
    for _ in range(draw(st.integers(1, 3))):
        ids = np.array(draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20)), np.uint32)
        prompt = draw(st.integers(1, len(ids) - 1))
        gather = np.tile(np.arange(k, dtype=np.uint32), (len(ids) - prompt, 1)) if kind is PayloadKind.GATHER else None
        items.append(ScoreItem(ids, prompt, gather))
    return build_score_request(items, spec, teacher="t", request_id="r").SerializeToString()


@st.composite
def bent(draw: Any, base: Any) -> bytes:
    """Bytes with flips, cuts, insertions and repeats."""
    data = bytearray(draw(base))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        action = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "drop"]))
        if action == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "cut":
            del data[at:]
        elif action == "insert":
            data[at:at] = draw(st.binary(max_size=6))
        elif action == "repeat":
            data[at:at] = data[at : at + 20]
        elif data:
            del data[at : at + draw(st.integers(1, 5))]
    return bytes(data)


@given(requests())
@FUZZ
def test_no_structured_request_crashes_the_server(live: Live, data: bytes) -> None:
    assert live.status("Score", data) in ALLOWED


@given(bent(good_requests()))
@FUZZ
def test_no_bent_request_crashes_the_server(live: Live, data: bytes) -> None:
    assert live.status("Score", data) in ALLOWED


@given(good_requests())
@FEWER
def test_what_is_valid_succeeds(live: Live, data: bytes) -> None:
    assert live.status("Score", data) is grpc.StatusCode.OK


@given(st.sampled_from(["Score", "GetHead", "Describe", "GetLoad"]), st.binary(max_size=100))
@FEWER
def test_no_raw_bytes_crash_the_server(live: Live, method: str, data: bytes) -> None:
    assert live.status(method, data) in ALLOWED


@given(st.sampled_from(["LoadTeacher", "UnloadTeacher", "SleepTeacher", "UpdateWeights"]), st.binary(max_size=60))
@settings(FUZZ, max_examples=50)
def test_no_raw_bytes_reach_the_admin_service(live: Live, method: str, data: bytes) -> None:
    assert live.status(method, data, "opd.wire.v1.AdminService") is grpc.StatusCode.PERMISSION_DENIED


@st.composite
def head_requests(draw: Any) -> bytes:
    return pb.GetHeadRequest(
        teacher=draw(st.just("t") | names), expected_hash=draw(st.just("") | names), chunk_bytes=draw(edges)
    ).SerializeToString()


@given(head_requests())
@FEWER
def test_no_head_request_crashes_the_server(live: Live, data: bytes) -> None:
    assert live.status("GetHead", data) in ALLOWED


BOUNDS = RequestBounds("t", VOCAB, frozenset(PayloadKind), True, 64, VOCAB, 4, 256, 1 << 20, 8)


def record(live: Live, spec: PayloadSpec, batches: bool) -> tuple[list[ScoreItem], list[bytes]]:
    rng = np.random.default_rng(0)
    gather = np.tile(np.arange(spec.k, dtype=np.uint32), (5, 1)) if spec.kind is PayloadKind.GATHER else None
    items = [ScoreItem(rng.integers(0, VOCAB, 8).astype(np.uint32), 3, gather) for _ in range(2)]
    message = build_score_request(items, spec, teacher="t", request_id="r", accept_batches=batches)
    data = message.SerializeToString()
    return items, list(live.channel.unary_stream("/opd.wire.v1.TeacherService/Score")(data))


def arrays(results: list[Any]) -> list[Any]:
    names = ("sampled", "values", "ids", "log_tail", "hidden", "logits")
    return [None if getattr(r, n) is None else getattr(r, n).tobytes() for r in results for n in names]


SPECS = [PayloadSpec.sampled(), PayloadSpec.topk(4), PayloadSpec.gather(3), PayloadSpec.hidden(), PayloadSpec.full()]


@pytest.mark.parametrize(
    ("spec", "batches"), [*((spec, False) for spec in SPECS), (SPECS[1], True), (SPECS[2], True)], ids=str
)
def test_a_lying_server_is_refused_or_told_the_truth(live: Live, spec: PayloadSpec, batches: bool) -> None:
    items, stream = record(live, spec, batches)

    def decode(messages: list[bytes]) -> list[Any]:
        decoder = ScoreStreamDecoder(items, spec, BOUNDS, request_id="r")
        for data in messages:
            try:
                message = pb.ScoreResponse.FromString(data)
            except Exception:
                raise CorruptPayloadError("gRPC refuses it before the decoder") from None
            decoder.feed(message)
        return decoder.finish()

    truth = arrays(decode(stream))

    @given(st.data())
    @FEWER
    def bend(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(stream) - 1))
        action = data.draw(st.sampled_from(["bend", "bend", "bend", "drop", "repeat", "swap"]))
        messages = list(stream)
        if action == "bend":
            messages[at] = data.draw(bent(st.just(stream[at])))
        elif action == "drop":
            del messages[at]
        elif action == "repeat":
            messages.insert(at, messages[at])
        else:
            other = data.draw(st.integers(0, len(stream) - 1))
            messages[at], messages[other] = messages[other], messages[at]
        try:
            results = decode(messages)
        except CorruptPayloadError:
            return
        assert arrays(results) == truth

    bend()


def test_a_lying_head_is_refused_or_the_true_one(live: Live) -> None:
    data = pb.GetHeadRequest(teacher="t").SerializeToString()
    stream = list(live.channel.unary_stream("/opd.wire.v1.TeacherService/GetHead")(data))

    @given(st.data())
    @FEWER
    def bend(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(stream) - 1))
        messages = list(stream)
        messages[at] = data.draw(bent(st.just(stream[at])))
        decoder = HeadStreamDecoder()
        try:
            for raw in messages:
                try:
                    message = pb.GetHeadResponse.FromString(raw)
                except Exception:
                    return
                decoder.feed(message)
            head = decoder.finish()
        except CorruptPayloadError:
            return
        assert head.weight.shape == (VOCAB, 8)

    bend()
