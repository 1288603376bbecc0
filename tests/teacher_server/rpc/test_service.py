"""The service end to end: answers equal the engine's own, refusals are typed, time adds up."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from waiting import EngineGate, until

from opd.errors import (
    CorruptPayloadError,
    DeadlineError,
    IncompatibleTeacherError,
    InvalidRequestError,
    NonFiniteError,
    OpdError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.wire.head import HeadStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec, Scores
from opd.wire.v1 import teacher_pb2 as pb


async def failure(call: Any) -> OpdError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    assert caught.value.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    return error_from_rpc(caught.value)


SPECS = [
    PayloadSpec.sampled(),
    PayloadSpec.topk(7),
    PayloadSpec.topk(97, "f32"),
    PayloadSpec.topk(7, "u16"),
    PayloadSpec.gather(5),
    PayloadSpec.hidden(),
    PayloadSpec.hidden("f32"),
    PayloadSpec.full(),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.k}-{s.value_dtype}")
@pytest.mark.parametrize(
    "options",
    [{}, {"accept_zstd": True}, {"temperature": 0.5}, {"chunk_bytes": 65536}, {"accept_batches": False}],
)
async def test_served_scores_equal_the_engines_own(
    spec: PayloadSpec, options: dict[str, Any], start: Any, items: Any, reference: Callable[..., Scores]
) -> None:
    client = await start()
    asked = items(5, k=spec.k if spec.kind == "gather" else 0)
    served = await client.score(asked, spec, **options)
    for item, got in zip(asked, served, strict=True):
        want = reference(client.engines["numpy"], item, spec, options.get("temperature", 1.0))
        for name in ("sampled", "ids", "log_tail", "hidden", "logits"):
            if getattr(want, name) is not None:
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        if want.values is not None:
            exact = spec.value_dtype == "f32"
            np.testing.assert_allclose(got.values, want.values, rtol=0 if exact else 5e-4, atol=0 if exact else 1e-3)
        assert got.weights_hash == client.engines["numpy"].info.weights_hash
    await client.settled()


async def test_sequences_of_many_calls_share_batches_on_one_engine_thread(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].seconds_per_batch = 0.05
    await asyncio.gather(*(client.score(items(4, seed=s), PayloadSpec.sampled()) for s in range(8)))
    batches = client.engines["numpy"].batches
    assert max(batches) > 4
    assert len(client.engines["numpy"].threads) <= 2  # the self-test runs on the loader's thread
    await client.settled()


async def test_timings_add_up_to_the_total(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].seconds_per_batch = 0.02
    for spec in (PayloadSpec.sampled(), PayloadSpec.topk(50), PayloadSpec.full()):
        t = (await client.score(items(6, rows=50), spec))[0].timings
        parts = t.admission + t.queue + t.batch_wait + t.engine + t.encode + t.send
        assert parts == pytest.approx(t.total, rel=0.02)
        assert t.engine >= 0.019


async def test_ranks_that_want_the_head_at_once_share_one_copy_of_it(start: Any) -> None:
    client = await start()
    engine, gate = client.engines["numpy"], threading.Event()
    made: list[int] = []
    plain = engine.head

    def head() -> Any:
        made.append(1)
        gate.wait(120)
        return plain()

    async def fetch() -> Any:
        decoder = HeadStreamDecoder(engine.info.head.hash)
        async for message in client.stub.GetHead(pb.GetHeadRequest(teacher="t")):
            decoder.feed(message)
        return decoder.finish()

    engine.head = head
    calls = [asyncio.create_task(fetch()) for _ in range(4)]
    await until(lambda: client.server.shared.teachers.get("t").in_flight == 4)
    calls[0].cancel()  # the one that asked first: the others still wait for what it began
    gate.set()
    assert all((found.weight == plain().weight).all() for found in await asyncio.gather(*calls[1:]))
    assert len(made) == 1
    for _ in range(200):
        await fetch()
        if len(made) > 1:
            return  # nothing is kept once the calls have ended
    pytest.fail("the copy is kept")


async def test_the_head_is_fetched_and_matches_its_hash(start: Any) -> None:
    client = await start()
    info = await client.info()
    decoder = HeadStreamDecoder(info.head.hash)
    async for message in client.stub.GetHead(pb.GetHeadRequest(teacher="t", expected_hash=info.head.hash)):
        decoder.feed(message)
    assert (decoder.finish().weight == client.engines["numpy"].head().weight).all()
    error = await failure(client.stub.GetHead(pb.GetHeadRequest(teacher="t", expected_hash="other")))
    assert type(error) is IncompatibleTeacherError
    assert type(await failure(client.stub.GetHead(pb.GetHeadRequest(teacher="u")))) is TeacherNotFoundError
    assert (
        type(await failure(client.stub.GetHead(pb.GetHeadRequest(teacher="t", chunk_bytes=1)))) is InvalidRequestError
    )


async def test_describe_lists_all_or_one_and_names_unknown_teachers(start: Any) -> None:
    client = await start({"a": "numpy", "b": "other"})
    answer = await client.stub.Describe(pb.DescribeRequest())
    assert [t.name for t in answer.teachers] == ["a", "b"]
    assert answer.instance_id
    one = (await client.stub.Describe(pb.DescribeRequest(teacher="b"))).teachers
    assert [t.model for t in one] == ["other"]
    assert (list(one[0].stop_token_ids), one[0].padding_rows) == ([5, 9], 31)
    error = await failure(client.stub.Describe(pb.DescribeRequest(teacher="c")))
    assert type(error) is TeacherNotFoundError
    assert "a, b" in str(error)


async def test_describe_sends_tokens_from_the_id_that_is_asked_for(start: Any) -> None:
    client = await start({"a": "numpy"})

    async def tokens(**asked: int) -> list[bytes]:
        answer = await client.stub.Describe(pb.DescribeRequest(teacher="a", **asked))
        return list(answer.teachers[0].tokenizer.tokens)

    every = await tokens(tokens_from=0)
    assert every[:3] == [b"t0", b"t1", b"t2"] and await tokens(tokens_from=2) == every[2:]
    assert await tokens() == await tokens(tokens_from=2**32 - 1) == []


def base(items: Any, **options: Any) -> pb.ScoreRequest:
    return build_score_request(items(2), PayloadSpec.sampled(), teacher="t", request_id="r", **options)


def bent(change: Callable[[pb.ScoreRequest], Any]) -> Callable[[Any], pb.ScoreRequest]:
    def make(items: Any) -> pb.ScoreRequest:
        message = base(items)
        change(message)
        return message

    return make


def words(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()


def sequence(**fields: Any) -> Callable[[Any], pb.ScoreRequest]:
    def change(message: pb.ScoreRequest) -> None:
        message.sequences[1].crc32c = 0
        for name, value in fields.items():
            setattr(message.sequences[1], name, value)

    return bent(change)


def gather(k: int, ids: bytes, dtype: int) -> Callable[[Any], pb.ScoreRequest]:
    def change(message: pb.ScoreRequest) -> None:
        message.gather.k = k
        del message.sequences[1:]
        message.sequences[0].CopyFrom(
            pb.Sequence(token_ids=words(1, 2, 3), prompt_length=1, gather_ids=ids, gather_ids_dtype=dtype)
        )

    return bent(change)


REFUSALS: list[tuple[str, Callable[[Any], pb.ScoreRequest], type[OpdError]]] = [
    ("no request id", bent(lambda m: setattr(m, "request_id", "")), InvalidRequestError),
    ("long request id", bent(lambda m: setattr(m, "request_id", "x" * 129)), InvalidRequestError),
    ("unknown teacher", bent(lambda m: setattr(m, "teacher", "u")), TeacherNotFoundError),
    ("no sequences", bent(lambda m: m.ClearField("sequences")), InvalidRequestError),
    ("too many sequences", bent(lambda m: m.sequences.extend([m.sequences[0]] * 300)), InvalidRequestError),
    ("no payload", bent(lambda m: m.ClearField("sampled")), InvalidRequestError),
    ("k of 0", bent(lambda m: m.topk.SetInParent()), InvalidRequestError),
    ("k beyond the limit", bent(lambda m: setattr(m.topk, "k", 98)), InvalidRequestError),
    ("k of all bits", bent(lambda m: setattr(m.topk, "k", 2**32 - 1)), InvalidRequestError),
    ("bf16 values", bent(lambda m: m.topk.MergeFrom(pb.TopKPayload(k=1, value_dtype=3))), InvalidRequestError),
    ("unknown dtype", bent(lambda m: m.topk.MergeFrom(pb.TopKPayload(k=1, value_dtype=99))), InvalidRequestError),
    ("hidden as f16", bent(lambda m: setattr(m.hidden, "value_dtype", pb.DTYPE_F16)), InvalidRequestError),
    ("temperature nan", bent(lambda m: setattr(m, "temperature", float("nan"))), InvalidRequestError),
    ("temperature inf", bent(lambda m: setattr(m, "temperature", float("inf"))), InvalidRequestError),
    ("temperature -1", bent(lambda m: setattr(m, "temperature", -1)), InvalidRequestError),
    ("temperature 1e-6", bent(lambda m: setattr(m, "temperature", 1e-6)), InvalidRequestError),
    ("odd bytes", sequence(token_ids=b"\1\0\0\0\2"), InvalidRequestError),
    ("no tokens", sequence(token_ids=b""), InvalidRequestError),
    ("empty prompt", sequence(prompt_length=0), InvalidRequestError),
    ("empty response", sequence(prompt_length=10), InvalidRequestError),
    ("prompt of all bits", sequence(prompt_length=2**32 - 1), InvalidRequestError),
    ("id at the vocabulary", sequence(token_ids=words(1, 97, 2), prompt_length=1), InvalidRequestError),
    ("id -1", sequence(token_ids=words(1, 2**32 - 1), prompt_length=1), InvalidRequestError),
    ("wrong checksum", sequence(crc32c=1), CorruptPayloadError),
    ("gather ids without gather", sequence(gather_ids=b"abc"), InvalidRequestError),
    ("gather id out of range", gather(2, words(1, 2, 3, 97), pb.DTYPE_U32), InvalidRequestError),
    ("gather id repeated", gather(2, words(1, 2, 3, 3), pb.DTYPE_U32), InvalidRequestError),
    ("gather too short", gather(2, words(1, 2, 3), pb.DTYPE_U32), InvalidRequestError),
    ("gather dtype", gather(2, words(1, 2, 3, 4), pb.DTYPE_F32), InvalidRequestError),
    ("chunk too small", bent(lambda m: setattr(m, "chunk_bytes", 1)), InvalidRequestError),
    ("chunk too large", bent(lambda m: setattr(m, "chunk_bytes", 1 << 30)), InvalidRequestError),
    ("client name", bent(lambda m: setattr(m, "client", "a b")), InvalidRequestError),
    ("long client name", bent(lambda m: setattr(m, "client", "a" * 65)), InvalidRequestError),
    ("other weights", bent(lambda m: setattr(m, "expected_weights_hash", "x")), IncompatibleTeacherError),
]


@pytest.mark.parametrize(("name", "make", "kind"), REFUSALS, ids=[r[0] for r in REFUSALS])
async def test_a_request_that_cannot_succeed_is_refused_by_type_before_the_engine_sees_it(
    name: str, make: Callable[[Any], pb.ScoreRequest], kind: type[OpdError], start: Any, items: Any
) -> None:
    client = await start()
    ran = len(client.engines["numpy"].batches)
    error = await failure(client.stub.Score(make(items)))
    assert type(error) is kind, error
    assert len(client.engines["numpy"].batches) == ran
    await client.settled()


async def test_limits_are_refused_with_the_limit_in_the_sentence(start: Any, items: Any) -> None:
    client = await start(limits={"max_sequence_tokens": 12, "max_request_tokens": 26, "allow_full": False})
    error = await failure(client.stub.Score(base(lambda n: items(n, rows=9))))
    assert "at most 12" in str(error)
    error = await failure(client.stub.Score(base(lambda n: items(3))))
    assert "at most 26" in str(error)
    full = build_score_request(items(1), PayloadSpec.full(), teacher="t", request_id="r")
    error = await failure(client.stub.Score(full))
    assert type(error) is IncompatibleTeacherError
    assert "full" in str(error)


async def test_an_oversize_message_is_refused_before_it_is_parsed(start: Any) -> None:
    client = await start(limits={"max_request_bytes": 4096})
    raw = client.channel.unary_stream("/opd.wire.v1.TeacherService/Score")
    for size in (4097, 8000):
        error = await failure(raw(bytes(size)))
        assert type(error) is InvalidRequestError
        assert "4096" in str(error)
    error = await failure(raw(bytes(200_000)))
    assert type(error) is InvalidRequestError


async def test_bytes_that_are_no_message_are_an_invalid_argument_on_every_method(start: Any) -> None:
    client = await start()
    for method in ("Describe", "GetLoad"):
        error = await failure(client.channel.unary_unary(f"/opd.wire.v1.TeacherService/{method}")(b"\xff\xff"))
        assert type(error) is InvalidRequestError
    for method in ("Score", "GetHead"):
        error = await failure(client.channel.unary_stream(f"/opd.wire.v1.TeacherService/{method}")(b"\x0a\x05\xff"))
        assert type(error) is InvalidRequestError
    error = await failure(client.channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\x01\xff"))
    assert type(error) is InvalidRequestError


async def test_nan_fails_its_own_request_and_no_other_of_the_batch(
    start: Any, items: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start()
    engine = client.engines["numpy"]
    good, bad = items(1, seed=1), items(1, seed=2)
    original = engine._one

    def poisoned(entry: Any) -> Scores:
        scores = original(entry)
        if entry.item.token_ids[0] == bad[0].token_ids[0]:
            scores.sampled[0] = np.nan
        return scores

    monkeypatch.setattr(engine, "_one", poisoned)
    engine.before_score = gate = EngineGate()
    worker = client.server.shared.teachers.get("t").worker
    blocker = asyncio.create_task(client.score(items(1, seed=3), PayloadSpec.sampled()))
    await until(lambda: gate.held)
    calls = [asyncio.create_task(client.score(asked, PayloadSpec.sampled())) for asked in (good, bad)]
    await until(lambda: worker.load()[0] == 2)
    gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await blocker
    assert isinstance(outcomes[0], list)
    assert type(error_from_rpc(outcomes[1])) is NonFiniteError
    await client.settled()


async def test_an_engine_that_raises_for_one_item_answers_the_others(start: Any, items: Any) -> None:
    client = await start()
    engine = client.engines["numpy"]
    bad = items(1, seed=2)

    def explode(batch: Any) -> None:
        if any((entry.item.token_ids[:4] == bad[0].token_ids[:4]).all() for entry in batch):
            raise ValueError("shape mismatch")

    engine.before_score = explode
    engine.seconds_per_batch = 0.05
    tasks = [asyncio.create_task(client.score(items(2, seed=s), PayloadSpec.sampled())) for s in (5, 6, 7)]
    tasks.append(asyncio.create_task(client.score(bad, PayloadSpec.sampled())))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, list) for outcome in outcomes[:3])
    assert type(error_from_rpc(outcomes[3])) is UnavailableError
    assert len(await client.score(items(1), PayloadSpec.sampled())) == 1
    await client.settled()


async def test_a_deadline_that_passes_in_the_queue_is_a_deadline_error(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].before_score = gate = EngineGate()
    blocker = asyncio.create_task(client.score(items(1), PayloadSpec.sampled()))
    await until(lambda: gate.held)
    message = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="late")
    error = await failure(client.stub.Score(message, timeout=0.15))
    assert type(error) is DeadlineError
    gate.open()
    await blocker
    await client.settled()


async def test_get_load_tells_the_queue_and_the_budget(start: Any, items: Any) -> None:
    client = await start()
    client.engines["numpy"].before_score = gate = EngineGate()
    first = asyncio.create_task(client.score(items(1), PayloadSpec.sampled()))
    await until(lambda: gate.held)
    second = asyncio.create_task(client.score(items(2), PayloadSpec.sampled()))
    await until(lambda: client.server.shared.teachers.get("t").worker.load()[0] == 2)
    load = await client.stub.GetLoad(pb.GetLoadRequest())
    assert load.teachers[0].queued_sequences == 2
    assert load.teachers[0].queued_tokens == 20
    assert load.teachers[0].running_tokens == 10
    assert load.token_budget_left == 262_144 - 30
    gate.open()
    await asyncio.gather(first, second)
    assert (await client.stub.GetLoad(pb.GetLoadRequest())).token_budget_left == 262_144


async def test_an_unexpected_exception_is_logged_and_answered_without_its_text(
    start: Any, monkeypatch: pytest.MonkeyPatch, log_text: Callable[[], str]
) -> None:
    client = await start()
    monkeypatch.setattr("teacher_server.rpc.service.teacher_info", lambda *a: 1 / 0)
    with pytest.raises(grpc.RpcError) as caught:
        await client.stub.Describe(pb.DescribeRequest())
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert "division" not in caught.value.details()
    incident = caught.value.details().split("incident ")[1].rstrip(".")
    (line,) = [entry for entry in map(json.loads, log_text().splitlines()) if entry["message"] == "unexpected error"]
    assert line["incident"] == incident and "ZeroDivisionError" in line["trace"]
    assert client.server.shared.metrics.unexpected_errors._value.get() == 1


async def test_ids_are_packed_unless_the_operator_says_otherwise(start: Any, items: Any) -> None:
    sizes = []
    for pack in (True, False):
        client = await start(transport={"pack_ids": pack})
        sizes.append(sum(scores.wire_bytes for scores in await client.score(items(2, rows=8), PayloadSpec.topk(4))))
    assert sizes == [2 * 8 * (4 * 2 + 8) + 2 * 8 * 4 * 18 // 8, 2 * 8 * (4 * 2 + 8) + 2 * 8 * 4 * 4]
