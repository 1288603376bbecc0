"""Score requests: the builder for clients and the parser for servers.

The parser trusts nothing in a message: every length is compared with its limit before bytes become arrays.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, IncompatibleTeacherError, InvalidRequestError
from opd.wire.bounds import (
    MAX_CHUNK_BYTES,
    MAX_NAME_CHARS,
    MIN_CHUNK_BYTES,
    RequestBounds,
    check_count,
    check_ids,
    check_lengths,
    check_payload,
    check_totals,
    gather_dtype,
)
from opd.wire.checksum import crc32c
from opd.wire.spans import check_spans, spans_from_bytes, spans_to_bytes
from opd.wire.tensors import byte_length, decode_tensor, dtype_code, dtype_name, pack_u18
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb

_CLIENT = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRequest:
    """A validated `ScoreRequest`.

    Attributes:
        request_id, teacher, client: as in the message.
        items: the sequences; their arrays are read-only views of the message's bytes where possible.
        ids_crc32c: CRC32C of each sequence's token ids.
        spec: the payload.
        temperature: 1.0 if the message gives none.
        chunk_bytes: preferred size of chunks; 0 leaves it to the server.
        accept_zstd: whether the client reads compressed tensors.
        expected_weights_hash: hash of the weights that the client expects; "" for any.
        tokens: number of prompt and response tokens in all sequences.
    """

    request_id: str
    teacher: str
    client: str
    items: list[ScoreItem]
    ids_crc32c: list[int]
    spec: PayloadSpec
    temperature: float
    chunk_bytes: int
    accept_zstd: bool
    expected_weights_hash: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutline:
    """What a request asks for, read without its ids: enough to price it, and to refuse it at no cost.

    Attributes:
        spec, temperature: as in `ParsedRequest`.
        tokens: prompt and response tokens of each sequence.
        rows: positions to score of each sequence; not yet certain if it has spans, which are checked when it is parsed.
    """

    spec: PayloadSpec
    temperature: float
    tokens: list[int]
    rows: list[int]


def build_score_request(
    items: Sequence[ScoreItem],
    spec: PayloadSpec,
    *,
    teacher: str,
    request_id: str,
    temperature: float = 1.0,
    expected_weights_hash: str = "",
    accept_zstd: bool = False,
    accept_batches: bool = False,
    chunk_bytes: int = 0,
    client: str = "",
) -> pb.ScoreRequest:
    """The request message for `items`, which should have passed `check_items`.

    Args:
        items: the sequences, with gather ids for payload gather.
        spec: the payload, the same for all sequences.
        teacher: name of the teacher.
        request_id: 1 to 128 characters, unique per attempt.
        temperature: divides the logits before normalisation.
        expected_weights_hash: hash that the teacher's weights must have; "" for any.
        accept_zstd: whether tensors may come compressed.
        accept_batches: whether small messages may come in batches.
        chunk_bytes: preferred size of chunks; 0 leaves it to the server.
        client: name of the client, for fair queueing and metrics.
    """
    message = pb.ScoreRequest(
        request_id=request_id,
        teacher=teacher,
        temperature=0.0 if temperature == 1.0 else temperature,  # 0 is unset in proto3 and means 1
        expected_weights_hash=expected_weights_hash,
        accept_zstd=accept_zstd,
        accept_batches=accept_batches,
        chunk_bytes=chunk_bytes,
        client=client,
    )
    _set_payload(message, spec)
    for item in items:
        message.sequences.append(_sequence(item))
    return message


def token_bytes(token_ids: NDArray[np.integer]) -> bytes:
    """Token ids as little-endian u32: the bytes whose CRC32C the server echoes."""
    return np.ascontiguousarray(token_ids, dtype="<u4").tobytes()


def _sequence(item: ScoreItem) -> pb.Sequence:
    tokens = token_bytes(item.token_ids)
    sequence = pb.Sequence(token_ids=tokens, prompt_length=item.prompt_length)
    gather = b""
    if item.gather_ids is not None:
        sequence.gather_ids_dtype = gather_dtype(item.gather_ids)
        packed = sequence.gather_ids_dtype == pb.DTYPE_U18
        gather = pack_u18(item.gather_ids).tobytes() if packed else token_bytes(item.gather_ids)
        sequence.gather_ids = gather
    spans = spans_to_bytes(item.spans)
    if spans:
        sequence.spans = spans
    # Over all three, in the order that the parser uses. 0 would mean that no checksum was sent.
    sequence.crc32c = crc32c(spans, crc32c(gather, crc32c(tokens)))
    return sequence


def _set_payload(message: pb.ScoreRequest, spec: PayloadSpec) -> None:
    # An empty message in a oneof counts as absent until it is set explicitly.
    if spec.kind is PayloadKind.SAMPLED:
        message.sampled.SetInParent()
    elif spec.kind is PayloadKind.TOPK:
        message.topk.CopyFrom(pb.TopKPayload(k=spec.k, value_dtype=dtype_code(spec.value_dtype)))
    elif spec.kind is PayloadKind.GATHER:
        message.gather.CopyFrom(pb.GatherPayload(k=spec.k, value_dtype=dtype_code(spec.value_dtype)))
    elif spec.kind is PayloadKind.HIDDEN:
        message.hidden.CopyFrom(pb.HiddenPayload(value_dtype=dtype_code(spec.value_dtype)))
    else:
        message.full.SetInParent()


def outline_score_request(message: pb.ScoreRequest, bounds: RequestBounds) -> RequestOutline:
    """Check everything about a client's message but the contents of its ids, of which no array is made.

    Raises:
        InvalidRequestError: if the request can never succeed.
        IncompatibleTeacherError: if the teacher does not serve the payload, the temperature or spans.
    """
    _check_text("request_id", message.request_id, least=1)
    _check_text("teacher", message.teacher, least=1)
    if not _CLIENT.fullmatch(message.client):
        raise InvalidRequestError("client must have at most 64 characters of [A-Za-z0-9._-].")
    check_chunk_bytes(message.chunk_bytes)
    spec = payload_of(message)
    temperature = message.temperature if message.temperature != 0.0 else 1.0
    check_payload(spec, temperature, bounds)
    check_count(len(message.sequences), bounds)
    tokens, rows = [], []
    for index, sequence in enumerate(message.sequences):
        size = len(sequence.token_ids)
        if size % 4:
            raise InvalidRequestError(f"sequence {index}: token_ids has {size} bytes, but ids take 4 bytes each.")
        check_lengths(index, size // 4, sequence.prompt_length, bounds)
        tokens.append(size // 4)
        rows.append(_rows(index, sequence, size // 4 - sequence.prompt_length, bounds))
    check_totals(sum(tokens), message.ByteSize(), bounds)
    return RequestOutline(spec, temperature, tokens, rows)


def _rows(index: int, sequence: pb.Sequence, response: int, bounds: RequestBounds) -> int:
    """Positions to score: those in the spans, or all of the response."""
    spans = sequence.spans
    if not spans:
        return response
    if not bounds.spans:
        raise IncompatibleTeacherError(
            f"teacher {bounds.teacher!r} scores whole responses only, but sequence {index} has spans; leave them out."
        )
    if len(spans) > 8 * response:  # each becomes a tuple, which is larger than its bytes
        raise InvalidRequestError(
            f"sequence {index} has {len(spans) // 8} spans in a response of {response} tokens; spans must not overlap."
        )
    return min(response, max(0, sum(end - start for start, end in spans_from_bytes(index, spans))))


def parse_score_request(message: pb.ScoreRequest, bounds: RequestBounds) -> ParsedRequest:
    """Validate a client's message and turn it into arrays.

    Raises:
        InvalidRequestError: if the request can never succeed.
        IncompatibleTeacherError: if the teacher does not serve the payload, the temperature or spans.
        CorruptPayloadError: if the checksum of a sequence does not match.
    """
    outline = outline_score_request(message, bounds)
    spec = outline.spec
    items = [_parse_sequence(i, sequence, spec, bounds) for i, sequence in enumerate(message.sequences)]
    return ParsedRequest(
        request_id=message.request_id,
        teacher=message.teacher,
        client=message.client,
        items=items,
        ids_crc32c=[crc32c(sequence.token_ids) for sequence in message.sequences],
        spec=spec,
        temperature=outline.temperature,
        chunk_bytes=message.chunk_bytes,
        accept_zstd=message.accept_zstd,
        expected_weights_hash=message.expected_weights_hash,
        tokens=sum(outline.tokens),
    )


def check_chunk_bytes(chunk: int) -> None:
    """Check the size of chunks that a client prefers.

    Raises:
        InvalidRequestError: if it is outside of the bounds, and not 0, which leaves it to the server.
    """
    if chunk and not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"chunk_bytes is {chunk}, but it must be 0 or {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}."
        )


def payload_of(message: pb.ScoreRequest) -> PayloadSpec:
    """The payload of a request, with defaults filled in.

    Raises:
        InvalidRequestError: if no payload is set, k is 0, or the payload cannot have this dtype.
    """
    which = message.WhichOneof("payload")
    if which is None:
        raise InvalidRequestError("the request names no payload; set sampled, topk, gather, hidden or full.")
    if which in ("sampled", "full"):
        return PayloadSpec(PayloadKind(which))
    body = getattr(message, which)
    default = "bf16" if which == "hidden" else "f16"
    name = default if body.value_dtype == pb.DTYPE_UNSPECIFIED else dtype_name(body.value_dtype)
    k = 0 if which == "hidden" else body.k
    # An unknown code becomes a name that `PayloadSpec` refuses.
    return PayloadSpec(PayloadKind(which), k, name or f"dtype {body.value_dtype}")


def _parse_sequence(index: int, sequence: pb.Sequence, spec: PayloadSpec, bounds: RequestBounds) -> ScoreItem:
    tokens, gather, spans = sequence.token_ids, sequence.gather_ids, sequence.spans
    if sequence.crc32c and crc32c(spans, crc32c(gather, crc32c(tokens))) != sequence.crc32c:
        raise CorruptPayloadError(
            f"sequence {index}: the checksum of token_ids does not match, so they were damaged on the way; send the "
            "request again."
        )
    ids = decode_tensor(tokens, pb.DTYPE_U32, 1, len(tokens) // 4)[0]
    item = ScoreItem(ids, sequence.prompt_length, spans=spans_from_bytes(index, spans))
    check_spans(index, item)
    if spec.kind is PayloadKind.GATHER:
        item = replace(item, gather_ids=_parse_gather(index, sequence, item.scored_length, spec.k))
    elif gather:
        raise InvalidRequestError(f"sequence {index} has gather_ids, but the payload is {spec.kind.value}.")
    check_ids(index, item, spec, bounds)
    return item


def _parse_gather(index: int, sequence: pb.Sequence, rows: int, k: int) -> NDArray[np.uint32]:
    dtype = sequence.gather_ids_dtype
    if dtype not in (pb.DTYPE_U18, pb.DTYPE_U32):
        raise InvalidRequestError(f"sequence {index}: gather_ids_dtype must be U18 or U32, but it is {dtype}.")
    expected = byte_length(dtype, rows, k)
    if len(sequence.gather_ids) != expected:
        raise InvalidRequestError(
            f"sequence {index}: gather_ids has {len(sequence.gather_ids)} bytes, but {rows} x {k} ids of "
            f"{dtype_name(dtype)} need {expected}."
        )
    return decode_tensor(sequence.gather_ids, dtype, rows, k)


def _check_text(field: str, value: str, *, least: int) -> None:
    if not least <= len(value) <= MAX_NAME_CHARS:
        raise InvalidRequestError(f"{field} must have {least} to {MAX_NAME_CHARS} characters, but it has {len(value)}.")
