"""What a teacher accepts, and the checks of a request that client and server share.

The client runs `check_items` before it sends a request, the server before it computes: the same bounds give the same
error messages on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opd.errors import IncompatibleTeacherError, InvalidRequestError
from opd.wire.spans import check_spans
from opd.wire.tensors import U18_LIMIT, byte_length
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb

MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MAX_NAME_CHARS = 128

_KINDS = {
    PayloadKind.SAMPLED: pb.PAYLOAD_KIND_SAMPLED,
    PayloadKind.TOPK: pb.PAYLOAD_KIND_TOPK,
    PayloadKind.GATHER: pb.PAYLOAD_KIND_GATHER,
    PayloadKind.HIDDEN: pb.PAYLOAD_KIND_HIDDEN,
    PayloadKind.FULL: pb.PAYLOAD_KIND_FULL,
}
_KIND_NAMES: dict[int, PayloadKind] = {code: kind for kind, code in _KINDS.items()}


def kind_code(kind: PayloadKind) -> pb.PayloadKind:
    """The contract's code for a payload kind."""
    return _KINDS[kind]


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a teacher accepts. The server knows these bounds; a client learns them from `Describe`.

    Attributes:
        teacher: its name, for error messages.
        vocab_size: number of ids in its vocabulary; every token id is below.
        payloads: the kinds of payload that it serves.
        supports_temperature: whether it applies temperatures other than 1.
        max_sequence_tokens: most tokens in a sequence, prompt and response together.
        max_k: largest k of topk and gather.
        max_sequences: most sequences in a request.
        max_request_tokens: most tokens in a request, over all its sequences.
        max_request_bytes: largest size of a request message.
        hidden_size: width of the hidden states; 0 if they are not served.
        spans: whether some positions of a response can be scored alone (`ScoreItem.spans`).
    """

    teacher: str
    vocab_size: int
    payloads: frozenset[PayloadKind]
    supports_temperature: bool
    max_sequence_tokens: int
    max_k: int
    max_sequences: int
    max_request_tokens: int
    max_request_bytes: int
    hidden_size: int = 0
    spans: bool = False

    @classmethod
    def from_info(cls, info: pb.TeacherInfo) -> "RequestBounds":
        """The bounds that a server announces in `Describe`; kinds that this client does not know are left out."""
        return cls(
            teacher=info.name,
            vocab_size=info.vocab_size,
            payloads=frozenset(_KIND_NAMES[code] for code in info.payloads if code in _KIND_NAMES),
            supports_temperature=info.supports_temperature,
            max_sequence_tokens=info.limits.max_sequence_tokens,
            max_k=info.limits.max_k,
            max_sequences=info.limits.max_sequences,
            max_request_tokens=info.limits.max_request_tokens,
            max_request_bytes=info.limits.max_request_bytes,
            hidden_size=info.head.hidden_size if info.HasField("head") else 0,
            spans=info.supports_spans,
        )


def check_payload(spec: PayloadSpec, temperature: float, bounds: RequestBounds) -> None:
    """Check the payload and the temperature of a request.

    Raises:
        InvalidRequestError: if k or the temperature is out of range.
        IncompatibleTeacherError: if the teacher does not serve the payload or the temperature.
    """
    if spec.kind not in bounds.payloads:
        served = ", ".join(sorted(bounds.payloads)) or "nothing"
        raise IncompatibleTeacherError(
            f"teacher {bounds.teacher!r} does not serve payload {spec.kind.value!r}; it serves {served}."
        )
    if spec.k > bounds.max_k:
        raise InvalidRequestError(
            f"k is {spec.k}, but teacher {bounds.teacher!r} serves at most {bounds.max_k}; ask for fewer ids."
        )
    # The wire carries float32, in which 0.01 is a little below 0.01.
    if not MIN_TEMPERATURE * 0.9999 <= temperature <= MAX_TEMPERATURE * 1.0001:
        raise InvalidRequestError(
            f"temperature is {temperature}, but it must lie between {MIN_TEMPERATURE} and {MAX_TEMPERATURE:g}."
        )
    # Temperature acts on logits, which the client computes from hidden states itself.
    if temperature != 1.0 and not bounds.supports_temperature and spec.kind is not PayloadKind.HIDDEN:
        raise IncompatibleTeacherError(
            f"teacher {bounds.teacher!r} scores at temperature 1 only, but {temperature:g} was asked for; use 1."
        )


def check_items(
    items: Sequence[ScoreItem], spec: PayloadSpec, temperature: float, bounds: RequestBounds, *, first: int = 0
) -> None:
    """Check a whole request against a teacher's bounds, before it is sent; messages count sequences from `first`.

    Raises:
        InvalidRequestError: if the request can never succeed; the message names the sequence, the value and the limit.
        IncompatibleTeacherError: if the teacher does not serve the payload or the temperature.
    """
    check_payload(spec, temperature, bounds)
    check_count(len(items), bounds)
    size = 0
    for index, item in enumerate(items, first):
        check_lengths(index, len(item.token_ids), item.prompt_length, bounds)
        check_spans(index, item)
        check_ids(index, item, spec, bounds)
        size += item_bytes(item)
    check_totals(sum(len(item.token_ids) for item in items), size, bounds)


def item_bytes(item: ScoreItem) -> int:
    """Bytes that a sequence's arrays take in a request; its other fields take at most 64 more."""
    size = 4 * len(item.token_ids) + 8 * len(item.spans)
    if item.gather_ids is not None:
        size += byte_length(gather_dtype(item.gather_ids), *item.gather_ids.shape)
    return size


def check_count(count: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError if a request has too few or too many sequences."""
    if not 1 <= count <= bounds.max_sequences:
        raise InvalidRequestError(
            f"the request has {count} sequences, but teacher {bounds.teacher!r} takes 1 to {bounds.max_sequences} at "
            "once."
        )


def check_totals(tokens: int, size: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError if a request has too many tokens or bytes."""
    if tokens > bounds.max_request_tokens:
        raise InvalidRequestError(
            f"the request has {tokens} tokens, but teacher {bounds.teacher!r} takes at most "
            f"{bounds.max_request_tokens}; send fewer sequences at once."
        )
    if size > bounds.max_request_bytes:
        raise InvalidRequestError(
            f"the request has {size} bytes, but teacher {bounds.teacher!r} takes at most "
            f"{bounds.max_request_bytes}; send fewer sequences at once."
        )


def check_lengths(index: int, tokens: int, prompt: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError if a sequence is too long, or its prompt or response is empty."""
    if tokens > bounds.max_sequence_tokens:
        raise InvalidRequestError(
            f"sequence {index} has {tokens} tokens, but teacher {bounds.teacher!r} takes at most "
            f"{bounds.max_sequence_tokens}; shorten it."
        )
    if not 1 <= prompt < tokens:
        raise InvalidRequestError(
            f"sequence {index}: prompt_length is {prompt} of {tokens} tokens, but prompt and response need at least "
            "one token each."
        )


def check_ids(index: int, item: ScoreItem, spec: PayloadSpec, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError for ids outside the vocabulary, and for gather ids of a wrong shape or with repeats."""
    if item.token_ids.ndim != 1 or item.token_ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"sequence {index}: token_ids must be one row of whole numbers, but they are {item.token_ids.dtype} of "
            f"shape {item.token_ids.shape}."
        )
    # Checked before the engine sees them: an id out of range fails the forward pass of the whole batch, and on a GPU it
    # trips an assertion after which every further call of the process fails.
    largest, smallest = int(item.token_ids.max()), int(item.token_ids.min())
    if largest >= bounds.vocab_size or smallest < 0:
        wrong = largest if largest >= bounds.vocab_size else smallest
        raise InvalidRequestError(
            f"sequence {index} holds token id {wrong}, but teacher {bounds.teacher!r} has ids 0 to "
            f"{bounds.vocab_size - 1}."
        )
    gather = item.gather_ids
    if (gather is not None) != (spec.kind is PayloadKind.GATHER):
        raise InvalidRequestError(
            f"sequence {index}: payload is {spec.kind.value}; give gather_ids with payload gather, and with no other."
        )
    if gather is None:
        return
    if gather.dtype.kind not in "iu":
        raise InvalidRequestError(f"sequence {index}: gather_ids must be whole numbers, but they are {gather.dtype}.")
    if gather.shape != (item.scored_length, spec.k):
        raise InvalidRequestError(
            f"sequence {index}: gather_ids has shape {gather.shape}, but the response and k need "
            f"({item.scored_length}, {spec.k})."
        )
    if int(gather.max()) >= bounds.vocab_size or int(gather.min()) < 0:
        wrong = int(gather.max()) if int(gather.max()) >= bounds.vocab_size else int(gather.min())
        raise InvalidRequestError(
            f"sequence {index}: gather_ids holds {wrong}, but teacher {bounds.teacher!r} has ids 0 to "
            f"{bounds.vocab_size - 1}."
        )
    # A repeated id would be counted twice in the mass of the head, and the tail would be too small by as much.
    if not rows_are_distinct(gather):
        raise InvalidRequestError(f"sequence {index}: gather_ids repeats an id at one position; give distinct ids.")


def gather_dtype(gather_ids: NDArray[np.integer]) -> pb.Dtype:
    """The dtype in which ids to gather travel: 18 bits if all of them fit, a little over half of what u32 takes."""
    return pb.DTYPE_U18 if gather_ids.size == 0 or int(gather_ids.max()) < U18_LIMIT else pb.DTYPE_U32


def rows_are_distinct(ids: NDArray[np.integer]) -> bool:
    """Whether no row of the [T, K] ids contains an id twice."""
    ordered = np.sort(ids, axis=1)
    return not bool((ordered[:, 1:] == ordered[:, :-1]).any())


def reply_bytes(spec: PayloadSpec, rows: int, vocab_size: int, hidden_size: int) -> int:
    """Bytes that the scores of `rows` positions occupy on the server until they are sent, before compression."""
    if spec.kind is PayloadKind.SAMPLED:
        return 4 * rows
    if spec.kind is PayloadKind.HIDDEN:
        return rows * hidden_size * (4 if spec.value_dtype == "f32" else 2)
    if spec.kind is PayloadKind.FULL:
        return 4 * rows * vocab_size
    width = 2 if spec.value_dtype == "f16" else 4  # u16 is made from float32
    per_id = width + (4 if spec.kind is PayloadKind.TOPK else 0)  # gather: the caller has the ids, they are not sent
    return rows * (spec.k * per_id + 16)  # 16: the sampled log-prob, the log tail, offset and step of u16


def unpacked_bytes(spec: PayloadSpec, tokens: Sequence[int], rows: Sequence[int]) -> int:
    """Bytes that the ids of a request occupy on the server until its last score is sent; `rows` as in `reply_bytes`."""
    return 4 * sum(tokens) + (4 * spec.k * sum(rows) if spec.kind is PayloadKind.GATHER else 0)
