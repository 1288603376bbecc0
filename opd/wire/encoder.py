"""The server's half of a score stream: scores become tensors, tensors become chunk messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import NonFiniteError
from opd.wire.checks import finite_bf16
from opd.wire.checksum import compress, crc32c
from opd.wire.layout import TensorLayout, layout_of
from opd.wire.tensors import encode_tensor
from opd.wire.types import PayloadSpec, Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb

MAX_AFFINE_SPAN = 64.0
"""Range of a row, in nats, above which its tensor is sent as f32 instead of being quantised to 16 bits.

At this range the error of a value, half a step, is 64 / 131,068 = 0.0005 nats.
"""

MIN_GAIN = 0.95
"""A tensor is sent compressed only if that takes at most this share of its plain size."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSequence:
    """A sequence that is ready to be sent: the specs of its tensors and their bytes, in the same order."""

    tensors: list[pb.TensorSpec]
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Size of all tensors on the wire, in bytes."""
        return sum(len(buffer) for buffer in self.buffers)

    def header(self, index: int, ids_crc32c: int) -> pb.ScoreResponse:
        """The message that announces this sequence."""
        return pb.ScoreResponse(sequence=pb.SequenceHeader(sequence=index, ids_crc32c=ids_crc32c, tensors=self.tensors))


def encode_scores(
    scores: Scores,
    spec: PayloadSpec,
    rows: int,
    *,
    vocab_size: int,
    hidden_size: int = 0,
    zstd: bool = False,
    pack_ids: bool = True,
) -> EncodedSequence:
    """Encode the scores of one sequence.

    Args:
        scores: what the engine returned; shapes as in `Scores`.
        spec: the payload that was asked for.
        rows: number of scored positions.
        vocab_size: V of the teacher.
        hidden_size: H of the teacher, for hidden payloads.
        zstd: compress the tensors that become smaller by it.
        pack_ids: send top-k ids in 18 bits if the vocabulary allows. Else in 32, which costs both sides less time.

    Raises:
        NonFiniteError: for NaN or +inf.
        ValueError: if the engine returned another shape than was asked for.
    """
    tensors: list[pb.TensorSpec] = []
    buffers: list[memoryview] = []
    for layout in layout_of(spec, vocab_size, hidden_size):
        array = _array(scores, layout, rows)
        _refuse_non_finite(array, layout)
        dtype = _dtype_for(array, layout, pack_ids)
        data = encode_tensor(array, dtype).data
        compression = pb.COMPRESSION_NONE
        if zstd:
            # Only if it saves bytes: the receiver allocates at most the plain size.
            packed = compress(data)
            if len(packed) <= MIN_GAIN * len(data):
                data, compression = memoryview(packed), pb.COMPRESSION_ZSTD
        tensors.append(
            pb.TensorSpec(
                role=layout.role,
                dtype=dtype,
                rows=rows,
                cols=layout.cols,
                byte_length=len(data),
                compression=compression,
                crc32c=crc32c(data),
            )
        )
        buffers.append(data)
    return EncodedSequence(tensors, buffers)


def cut(buffers: Sequence[memoryview], chunk_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the concatenation of `buffers` into (offset, views) of at most `chunk_bytes` each, without copying."""
    offset = 0
    pending: list[memoryview] = []
    room = chunk_bytes
    for whole in buffers:
        # Only views: the bytes are copied once, when a message is built.
        buffer = whole
        while len(buffer):
            pending.append(buffer[:room])
            room -= len(pending[-1])
            buffer = buffer[len(pending[-1]) :]
            if room == 0:
                yield offset, pending
                offset, pending, room = offset + chunk_bytes, [], chunk_bytes
    if pending:
        yield offset, pending


def chunk_messages(buffers: Sequence[memoryview], chunk_bytes: int) -> Iterator[pb.Chunk]:
    """The chunks of `buffers` as messages, built one at a time."""
    for offset, views in cut(buffers, chunk_bytes):
        yield pb.Chunk(offset=offset, data=b"".join(views))


def chunk_responses(buffers: Sequence[memoryview], chunk_bytes: int) -> Iterator[bytes]:
    """The chunks of `buffers` as serialised `ScoreResponse` messages, each built by a single copy.

    The bytes equal those of `ScoreResponse(chunk=...)`, for which protobuf copies a chunk three times.
    """
    for offset, views in cut(buffers, chunk_bytes):
        size = sum(len(view) for view in views)
        # In Chunk, field 1 is the offset (left out if 0) and field 2 the data. In ScoreResponse, field 3 is the chunk.
        inner = (b"\x08" + _varint(offset) if offset else b"") + b"\x12" + _varint(size)
        yield b"".join([b"\x1a", _varint(len(inner) + size), inner, *views])


def batch_response(parts: Sequence[bytes]) -> bytes:
    """One serialised `ScoreResponse` that holds the given serialised ones as a batch."""
    # In ScoreBatch, field 1 is repeated once per message. In ScoreResponse, field 5 is the batch.
    batch = b"".join(piece for part in parts for piece in (b"\x0a", _varint(len(part)), part))
    return b"".join([b"\x2a", _varint(len(batch)), batch])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def timings_message(timings: Timings) -> pb.Timings:
    """The contract's message for `Timings`."""
    return pb.Timings(
        admission_seconds=timings.admission,
        queue_seconds=timings.queue,
        batch_wait_seconds=timings.batch_wait,
        engine_seconds=timings.engine,
        encode_seconds=timings.encode,
        send_seconds=timings.send,
        total_seconds=timings.total,
    )


_FIELDS: dict[int, str] = {
    pb.TENSOR_ROLE_SAMPLED: "sampled",
    pb.TENSOR_ROLE_VALUES: "values",
    pb.TENSOR_ROLE_IDS: "ids",
    pb.TENSOR_ROLE_LOG_TAIL: "log_tail",
    pb.TENSOR_ROLE_HIDDEN: "hidden",
    pb.TENSOR_ROLE_LOGITS: "logits",
}


def _array(scores: Scores, layout: TensorLayout, rows: int) -> NDArray[Any]:
    name = _FIELDS[layout.role]
    array: NDArray[Any] | None = getattr(scores, name)
    if array is None:
        raise ValueError(f"the engine's scores lack {name}, which the payload needs.")
    table = array.reshape(-1, 1) if array.ndim == 1 else array
    if table.shape != (rows, layout.cols):
        raise ValueError(f"{name} must have shape ({rows}, {layout.cols}), but the engine returned {array.shape}.")
    return table


def _refuse_non_finite(array: NDArray[Any], layout: TensorLayout) -> None:
    """Raise NonFiniteError for NaN and +inf; -inf means probability zero in log-probs and logits, and is allowed."""
    if layout.role == pb.TENSOR_ROLE_IDS or _is_fine(array, layout):
        return
    rows = [not _is_fine(row, layout) for row in array]  # slow, but only on the way to an error
    raise NonFiniteError(
        f"the model produced NaN or infinity in {_FIELDS[layout.role]} at response token {rows.index(True)}; "
        "check its weights and compute dtype."
    )


def _is_fine(array: NDArray[Any], layout: TensorLayout) -> bool:
    # Phrased as what must be true, because comparisons with NaN are false.
    if array.dtype == np.uint16:
        return finite_bf16(array)
    highest = bool(array.max() < np.inf)
    return highest and (layout.role != pb.TENSOR_ROLE_HIDDEN or bool(array.min() > -np.inf))


def _dtype_for(array: NDArray[Any], layout: TensorLayout, pack_ids: bool) -> pb.Dtype:
    if layout.dtype == pb.DTYPE_U18 and not pack_ids:
        return pb.DTYPE_U32
    if layout.dtype != pb.DTYPE_U16_AFFINE:
        return layout.dtype
    # A wider row would lose too much in 16 bits; readers accept f32 in its place, see `layout_of`.
    finite = np.isfinite(array)
    high = np.where(finite, array, -np.inf).max(axis=1)
    low = np.where(finite, array, np.inf).min(axis=1)
    return pb.DTYPE_F32 if bool((high - low > MAX_AFFINE_SPAN).any()) else layout.dtype
