"""Score requests: the client's builder and the server's parser.

Nothing in a message is trusted: every length is compared with its limit before bytes are turned into arrays.
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
        request_id, teacher, client: as given.
        items: the sequences; arrays are read-only views of the message's bytes.
        ids_crc32c: CRC32C of each sequence's token ids.
        spec: the payload.
        temperature: 1.0 when not given.
        chunk_bytes: 0 for the server's choice.
        accept_zstd: whether compressed tensors are understood.
        expected_weights_hash: "" for any.
        tokens: prompt plus response tokens of all sequences.
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
    """The message for `items`; run `check_items` first.

    Args:
        items: the sequences, with gather ids for payload gather.
        spec: the payload, the same for all.
        teacher: its name.
        request_id: 1 to 128 characters, unique per attempt.
        temperature: divides the logits before normalisation.
        expected_weights_hash: refuse other weights; "" for any.
        accept_zstd: whether tensors may come compressed.
        accept_batches: whether small messages may come several at once.
        chunk_bytes: wanted chunk size, 0 for the server's choice.
        client: name for fair queueing.
    """
    message = pb.ScoreRequest(
        request_id=request_id,
        teacher=teacher,
        temperature=0.0 if temperature == 1.0 else temperature,  # 0 is unset in proto3, and stands for 1
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
    """Token ids as u32 little-endian bytes, the form whose CRC32C the server echoes."""
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
    # Over all three, in the order of the parser; 0 stands for a client that sent none.
    sequence.crc32c = crc32c(spans, crc32c(gather, crc32c(tokens)))
    return sequence


def _set_payload(message: pb.ScoreRequest, spec: PayloadSpec) -> None:
    # An empty message of a oneof counts as absent until it is set explicitly.
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


def parse_score_request(message: pb.ScoreRequest, bounds: RequestBounds) -> ParsedRequest:
    """Validate everything a client sent; nothing is trusted.

    Raises:
        InvalidRequestError: a request that can never succeed.
        IncompatibleTeacherError: the teacher does not serve the payload or the temperature.
        CorruptPayloadError: a sequence whose checksum does not match.
    """
    _check_text("request_id", message.request_id, least=1)
    _check_text("teacher", message.teacher, least=1)
    if not _CLIENT.fullmatch(message.client):
        raise InvalidRequestError("client must be at most 64 characters of [A-Za-z0-9._-].")
    chunk = message.chunk_bytes
    if chunk and not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"chunk_bytes is {chunk}, but it must be 0 or {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}."
        )
    spec = payload_of(message)
    temperature = message.temperature if message.temperature != 0.0 else 1.0
    check_payload(spec, temperature, bounds)
    check_count(len(message.sequences), bounds)
    # Sums of lengths before any sequence is decoded: a request that is too large costs no arrays.
    total = sum(len(sequence.token_ids) // 4 for sequence in message.sequences)
    check_totals(total, message.ByteSize(), bounds)
    items = [_parse_sequence(i, sequence, spec, bounds) for i, sequence in enumerate(message.sequences)]
    return ParsedRequest(
        request_id=message.request_id,
        teacher=message.teacher,
        client=message.client,
        items=items,
        ids_crc32c=[crc32c(sequence.token_ids) for sequence in message.sequences],
        spec=spec,
        temperature=temperature,
        chunk_bytes=chunk,
        accept_zstd=message.accept_zstd,
        expected_weights_hash=message.expected_weights_hash,
        tokens=sum(len(item.token_ids) for item in items),
    )


def payload_of(message: pb.ScoreRequest) -> PayloadSpec:
    """The payload of a request, defaults filled in.

    Raises:
        InvalidRequestError: none is set, k is 0, or the element type does not go with the payload.
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
    # A code that is not known here becomes a name that `PayloadSpec` refuses.
    return PayloadSpec(PayloadKind(which), k, name or f"dtype {body.value_dtype}")


def _parse_sequence(index: int, sequence: pb.Sequence, spec: PayloadSpec, bounds: RequestBounds) -> ScoreItem:
    tokens, gather, spans = sequence.token_ids, sequence.gather_ids, sequence.spans
    if len(tokens) % 4:
        raise InvalidRequestError(f"sequence {index}: token_ids has {len(tokens)} bytes, which is not a multiple of 4.")
    check_lengths(index, len(tokens) // 4, sequence.prompt_length, bounds)
    if sequence.crc32c and crc32c(spans, crc32c(gather, crc32c(tokens))) != sequence.crc32c:
        raise CorruptPayloadError(f"sequence {index}: checksum of the ids does not match; send the request again.")
    if spans and not bounds.spans:
        raise IncompatibleTeacherError(
            f"teacher {bounds.teacher!r} scores whole responses only, but sequence {index} has spans; leave them out."
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
