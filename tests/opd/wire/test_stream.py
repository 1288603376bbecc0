"""Score streams: what the encoder sends is what the decoder returns, and every violation is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opd.errors import CorruptPayloadError, NonFiniteError
from opd.wire.bounds import RequestBounds
from opd.wire.checksum import crc32c
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.encoder import batch_response, chunk_messages, chunk_responses, encode_scores, timings_message
from opd.wire.request import token_bytes
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb

HIDDEN = 16


def messages(
    cases: list[Any], bounds: RequestBounds, *, chunk: int = 100, zstd: bool = False
) -> list[pb.ScoreResponse]:
    out = [pb.ScoreResponse(header=pb.ScoreHeader(request_id="r", weights_hash="w", sequence_count=len(cases)))]
    for index, c in enumerate(cases):
        encoded = encode_scores(
            c.scores,
            c.spec,
            c.item.response_length,
            vocab_size=bounds.vocab_size,
            hidden_size=bounds.hidden_size,
            zstd=zstd,
        )
        out.append(encoded.header(index, crc32c(token_bytes(c.item.token_ids))))
        out += [pb.ScoreResponse(chunk=chunk) for chunk in chunk_messages(encoded.buffers, chunk)]
    timings = timings_message(Timings(admission=0.5, total=0.5))
    out.append(pb.ScoreResponse(trailer=pb.ScoreTrailer(timings=timings)))
    return out


def decode(cases: list[Any], bounds: RequestBounds, stream: list[pb.ScoreResponse], **kw: Any) -> list[Scores]:
    decoder = ScoreStreamDecoder([c.item for c in cases], cases[0].spec, bounds, request_id="r", **kw)
    for message in stream:
        decoder.feed(pb.ScoreResponse.FromString(message.SerializeToString()))
    return decoder.finish()


def test_ids_of_32_bits_are_read_like_packed_ones(case: Callable[..., Any], bounds: RequestBounds) -> None:
    c = case(PayloadSpec.topk(7), rows=5)
    plain, packed = (
        encode_scores(c.scores, c.spec, 5, vocab_size=bounds.vocab_size, pack_ids=pack) for pack in (False, True)
    )
    assert [t.dtype for t in plain.tensors if t.role == pb.TENSOR_ROLE_IDS] == [pb.DTYPE_U32]
    assert plain.nbytes - packed.nbytes == 5 * 7 * 4 - (5 * 7 * 18 + 7) // 8
    stream = messages([c], bounds)
    stream[1:-1] = [
        plain.header(0, crc32c(token_bytes(c.item.token_ids))),
        *(pb.ScoreResponse(chunk=chunk) for chunk in chunk_messages(plain.buffers, 100)),
    ]
    assert (decode([c], bounds, stream)[0].ids == c.scores.ids).all()


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_scores_round_trip_for_every_payload_and_chunk_size(
    spec: PayloadSpec, chunk: int, case: Callable[..., Any], bounds: RequestBounds
) -> None:
    if chunk == 1 and spec.kind is PayloadKind.FULL:
        pytest.skip("8,400 one-byte messages say nothing new")
    cases = [case(spec, rows=rows, seed=rows) for rows in (1, 4)]
    results = decode(cases, bounds, messages(cases, bounds, chunk=chunk))
    for got, sent in zip(results, cases, strict=True):
        for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
            there, back = getattr(sent.scores, name), getattr(got, name)
            assert (there is None) == (back is None), name
            if there is None:
                continue
            exact = name != "values" or spec.value_dtype == "f32"
            tolerance = 0 if exact else 8e-3
            np.testing.assert_allclose(np.asarray(back, np.float64), np.asarray(there, np.float64), atol=tolerance)
        assert got.weights_hash == "w"
        assert got.timings == Timings(admission=0.5, total=0.5)
        assert got.wire_bytes > 0


def test_zstd_round_trips_and_is_used_only_where_it_gains(case: Callable[..., Any], bounds: RequestBounds) -> None:
    c = case(PayloadSpec.topk(8), rows=20)
    c.scores.values[:] = c.scores.values[:1]
    c.scores.ids[:] = c.scores.ids[:1]
    c.scores.log_tail[:] = c.scores.log_tail[:1]
    c.scores.sampled[:] = c.scores.log_tail - 3
    c.item.token_ids[3:] = next(i for i in range(300) if i not in c.scores.ids[0])
    c.scores.sampled[:] = np.minimum(c.scores.sampled, c.scores.values[:, -1].astype(np.float32) - 1)
    stream = messages([c], bounds, zstd=True)
    used = {t.role: t.compression for t in stream[1].sequence.tensors}
    assert pb.COMPRESSION_ZSTD in used.values()
    got = decode([c], bounds, stream)[0]
    assert (got.ids == c.scores.ids).all()
    plain = decode([c], bounds, messages([c], bounds))[0]
    assert got.wire_bytes < plain.wire_bytes
    assert (got.values == plain.values).all()


def test_a_wide_row_is_sent_as_f32_when_16_bits_would_be_too_coarse(
    case: Callable[..., Any], bounds: RequestBounds
) -> None:
    c = case(PayloadSpec.topk(300, "u16"), rows=2)
    wide = c.scores.values * 40
    top = wide.max(axis=1, keepdims=True)
    c.scores.values[:] = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    order = c.scores.ids == c.item.response_ids[:, None]
    c.scores.sampled[:] = c.scores.values[order]
    stream = messages([c], bounds)
    assert stream[1].sequence.tensors[1].dtype == pb.DTYPE_F32
    assert (decode([c], bounds, stream)[0].values == c.scores.values).all()


def test_a_sequence_is_returned_as_soon_as_its_last_byte_is_there(
    case: Callable[..., Any], bounds: RequestBounds
) -> None:
    cases = [case(PayloadSpec.sampled(), seed=s) for s in range(3)]
    decoder = ScoreStreamDecoder([c.item for c in cases], cases[0].spec, bounds)
    done = [[index for index, _ in decoder.feed(m)] for m in messages(cases, bounds)]
    assert done == [[], [], [0], [], [1], [], [2], []]


def _first(stream: list[pb.ScoreResponse], kind: str) -> Any:
    return next(getattr(m, kind) for m in stream if m.WhichOneof("message") == kind)


def _flip(stream: list[pb.ScoreResponse]) -> None:
    chunk = _first(stream, "chunk")
    chunk.data = chunk.data[:-1] + bytes([chunk.data[-1] ^ 1])


def _share(stream: list[pb.ScoreResponse]) -> None:
    """What servers once sent to clients on their host: field 4 of the sequence's header, and no chunks."""
    _first(stream, "sequence").MergeFromString(b"\x22\x07\x0a\x05opd-1")
    stream[:] = [message for message in stream if message.WhichOneof("message") != "chunk"]


VIOLATIONS: dict[str, Callable[[list[pb.ScoreResponse]], Any]] = {
    "no header": lambda s: s.pop(0),
    "two headers": lambda s: s.insert(1, s[0]),
    "other request": lambda s: setattr(s[0].header, "request_id", "q"),
    "other count": lambda s: setattr(s[0].header, "sequence_count", 9),
    "sequence skipped": lambda s: setattr(_first(s, "sequence"), "sequence", 1),
    "other ids": lambda s: setattr(_first(s, "sequence"), "ids_crc32c", 1),
    "tensor missing": lambda s: _first(s, "sequence").tensors.pop(),
    "tensor twice": lambda s: _first(s, "sequence").tensors.append(_first(s, "sequence").tensors[0]),
    "other role": lambda s: setattr(_first(s, "sequence").tensors[0], "role", pb.TENSOR_ROLE_HEAD_BIAS),
    "other dtype": lambda s: setattr(_first(s, "sequence").tensors[0], "dtype", pb.DTYPE_U32),
    "no dtype": lambda s: setattr(_first(s, "sequence").tensors[0], "dtype", 0),
    "unknown dtype": lambda s: setattr(_first(s, "sequence").tensors[0], "dtype", 77),
    "more rows": lambda s: setattr(_first(s, "sequence").tensors[0], "rows", 1 << 31),
    "other columns": lambda s: setattr(_first(s, "sequence").tensors[0], "cols", 2),
    "huge tensor": lambda s: setattr(_first(s, "sequence").tensors[0], "byte_length", 1 << 60),
    "short tensor": lambda s: setattr(_first(s, "sequence").tensors[0], "byte_length", 1),
    "unknown compression": lambda s: setattr(_first(s, "sequence").tensors[0], "compression", 9),
    "false compression": lambda s: setattr(_first(s, "sequence").tensors[0], "compression", pb.COMPRESSION_ZSTD),
    "wrong checksum": lambda s: setattr(_first(s, "sequence").tensors[0], "crc32c", 1),
    "flipped bit": _flip,
    "chunk gap": lambda s: setattr(_first(s, "chunk"), "offset", 1),
    "empty chunk": lambda s: setattr(_first(s, "chunk"), "data", b""),
    "chunk too long": lambda s: setattr(_first(s, "chunk"), "data", bytes(1 << 16)),
    "chunk outside": lambda s: s.insert(1, pb.ScoreResponse(chunk=pb.Chunk(data=b"x"))),
    "empty message": lambda s: s.insert(1, pb.ScoreResponse()),
    "early trailer": lambda s: s.insert(1, s[-1]),
    "trailer in a sequence": lambda s: s.insert(2, s[-1]),
    "message after the trailer": lambda s: s.append(s[-1]),
    "no trailer": lambda s: s.pop(),
    "handles of shared memory instead of chunks": _share,
}


@pytest.mark.parametrize("violation", VIOLATIONS)
@pytest.mark.parametrize("kind", ["topk", "gather", "sampled", "hidden", "full"])
def test_every_violation_of_the_stream_is_refused(
    violation: str, kind: str, case: Callable[..., Any], bounds: RequestBounds
) -> None:
    spec = PayloadSpec(PayloadKind(kind), 8 if kind in ("topk", "gather") else 0, "bf16" if kind == "hidden" else "f16")
    cases = [case(spec, seed=s) for s in range(2)]
    stream = messages(cases, bounds)
    assert decode(cases, bounds, stream)
    VIOLATIONS[violation](stream)
    with pytest.raises(CorruptPayloadError):
        decode(cases, bounds, stream)


def _set(name: str, at: Any, value: float) -> Callable[[Scores], None]:
    def change(scores: Scores) -> None:
        getattr(scores, name)[at] = value

    return change


LIES: list[tuple[str, PayloadSpec, Callable[[Scores], None]]] = [
    ("sampled above zero", PayloadSpec.sampled(), _set("sampled", 2, 0.5)),
    ("sampled contradicts", PayloadSpec.topk(300, "f32"), _set("sampled", 2, -0.001)),
    ("sampled above the k", PayloadSpec.topk(4, "f32"), _set("sampled", slice(None), -0.001)),
    ("mass too large", PayloadSpec.topk(8, "f32"), _set("log_tail", 1, -0.01)),
    ("mass too small", PayloadSpec.topk(8, "f32"), _set("log_tail", 1, -np.inf)),
    ("id out of range", PayloadSpec.topk(8), _set("ids", (0, 0), 300)),
    ("repeated id", PayloadSpec.topk(8), lambda s: s.ids.__setitem__((0, 0), s.ids[0, 1])),
    ("not descending", PayloadSpec.topk(8), lambda s: s.values.__setitem__((0, 0), s.values[0, 7])),
    ("gather mass", PayloadSpec.gather(8), _set("log_tail", 1, 0.0)),
]


@pytest.mark.parametrize(("name", "spec", "lie"), LIES, ids=[name for name, _, _ in LIES])
def test_numbers_that_cannot_be_a_teachers_are_refused(
    name: str, spec: PayloadSpec, lie: Callable[[Scores], None], case: Callable[..., Any], bounds: RequestBounds
) -> None:
    c = case(spec)
    assert decode([c], bounds, messages([c], bounds))
    lie(c.scores)
    with pytest.raises(CorruptPayloadError):
        decode([c], bounds, messages([c], bounds))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["sampled", "values", "log_tail", "hidden", "logits"])
def test_non_finite_numbers_never_leave_and_never_arrive(
    field: str, bad: float, case: Callable[..., Any], bounds: RequestBounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"hidden": PayloadSpec.hidden("f32"), "logits": PayloadSpec.full()}.get(field, PayloadSpec.topk(4, "f32"))
    c = case(spec)
    array = getattr(c.scores, field)
    array[(1,) * array.ndim] = bad
    with pytest.raises(NonFiniteError, match="response token 1"):
        messages([c], bounds)
    monkeypatch.setattr("opd.wire.encoder._refuse_non_finite", lambda array, layout: None)
    with pytest.raises(CorruptPayloadError):
        decode([c], bounds, messages([c], bounds))


def test_bf16_infinity_is_found_by_its_bits(case: Callable[..., Any], bounds: RequestBounds) -> None:
    c = case(PayloadSpec.hidden())
    c.scores.hidden[0, 0] = 0x7F80
    with pytest.raises(NonFiniteError):
        messages([c], bounds)


def test_minus_infinity_is_a_probability_of_zero(bounds: RequestBounds) -> None:
    ids = np.array([1, 2, 3], np.uint32)
    values = np.array([[np.log(0.5), np.log(0.5), -np.inf]], np.float32)
    tail = np.array([-np.inf], np.float32)
    for dtype in ("f32", "f16", "u16"):
        scores = Scores(np.array([-np.inf], np.float32), values, np.array([[4, 5, 3]], np.uint32), tail)
        c = SimpleNamespace(item=ScoreItem(ids, 2), spec=PayloadSpec.topk(3, dtype), scores=scores)
        got = decode([c], bounds, messages([c], bounds))[0]
        assert got.values[0, 2] == -np.inf and got.sampled[0] == -np.inf


def test_an_engine_that_returns_another_shape_is_a_bug_not_an_answer(
    case: Callable[..., Any], bounds: RequestBounds
) -> None:
    c = case(PayloadSpec.topk(8))
    with pytest.raises(ValueError, match="values must have shape"):
        encode_scores(c.scores, PayloadSpec.topk(7), 7, vocab_size=300)
    with pytest.raises(ValueError, match="scores lack"):
        encode_scores(Scores(), PayloadSpec.sampled(), 7, vocab_size=300)


def batched(stream: list[pb.ScoreResponse], ends: list[int]) -> list[pb.ScoreResponse]:
    """The messages in batches that end at `ends`."""
    found, start = [], 0
    for end in sorted({*ends, len(stream)}):
        parts = [message.SerializeToString() for message in stream[start:end]]
        found.append(pb.ScoreResponse.FromString(batch_response(parts)))
        assert list(found[-1].batch.messages) == stream[start:end]
        start = end
    return found


@pytest.mark.parametrize("ends", [[], [1], [1, 2, 3], [4, 6]])
def test_messages_in_batches_say_what_they_say_one_by_one(
    ends: list[int], case: Callable[..., Any], bounds: RequestBounds
) -> None:
    cases = [case(PayloadSpec.topk(7), rows=rows, seed=rows) for rows in (1, 4)]
    stream = messages(cases, bounds)
    for alone, together in zip(
        decode(cases, bounds, stream), decode(cases, bounds, batched(stream, ends)), strict=True
    ):
        np.testing.assert_array_equal(alone.values, together.values)
        np.testing.assert_array_equal(alone.ids, together.ids)


def test_a_batch_that_is_empty_or_holds_another_is_refused(case: Callable[..., Any], bounds: RequestBounds) -> None:
    cases = [case(PayloadSpec.topk(7))]
    stream = messages(cases, bounds)
    for bad in (pb.ScoreResponse(batch=pb.ScoreBatch()), pb.ScoreResponse(batch={"messages": batched(stream, [])})):
        with pytest.raises(CorruptPayloadError, match="a batch"):
            decode(cases, bounds, [bad])


@pytest.mark.parametrize("sizes", [[1], [127], [128, 5], [70_000, 70_000], [3, 0, 300_000]])
@pytest.mark.parametrize("chunk", [65_536, 1 << 20])
def test_hand_written_chunk_messages_are_those_of_protobuf(sizes: list[int], chunk: int) -> None:
    rng = np.random.default_rng(0)
    buffers = [memoryview(rng.bytes(size)) for size in sizes]
    plain = [pb.ScoreResponse(chunk=message).SerializeToString() for message in chunk_messages(buffers, chunk)]
    assert list(chunk_responses(buffers, chunk)) == plain
    assert b"".join(pb.ScoreResponse.FromString(m).chunk.data for m in plain) == b"".join(buffers)
