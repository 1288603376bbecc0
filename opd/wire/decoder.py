"""The client's half of a score stream: takes messages, returns validated `Scores` as each sequence is complete."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError
from opd.wire import checks
from opd.wire.assembly import Assembly
from opd.wire.bounds import RequestBounds
from opd.wire.checksum import Buffer, crc32c, unpack
from opd.wire.layout import layout_of
from opd.wire.request import token_bytes
from opd.wire.tensors import byte_length, decode_tensor, dtype_name
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb


class ScoreStreamDecoder:
    """Assembles a score stream and refuses whatever violates the contract.

    Memory is bounded by what was asked for: a tensor whose announced size does not follow from the request is refused
    before any of its bytes are stored.

    Args:
        items: the request's sequences.
        spec: the request's payload.
        bounds: the teacher's bounds, from `Describe`.
        request_id: the id that the stream must echo; "" skips the check.
        expected_weights_hash: the hash that the header must carry; "" accepts any.

    Attributes:
        weights_hash: from the header; "" until it has arrived.
        trailer: the last message; None until it has arrived.
    """

    def __init__(
        self,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        bounds: RequestBounds,
        *,
        request_id: str = "",
        expected_weights_hash: str = "",
    ) -> None:
        self.weights_hash = ""
        self.trailer: pb.ScoreTrailer | None = None
        self._items = items
        self._spec = spec
        self._bounds = bounds
        self._layouts = layout_of(spec, bounds.vocab_size, bounds.hidden_size)
        self._request_id = request_id
        self._expected_hash = expected_weights_hash
        self._next = 0
        self._started = False
        self._header: pb.SequenceHeader | None = None
        self._assembly = Assembly("a sequence", 0)
        self._results: dict[int, Scores] = {}

    def feed(self, message: pb.ScoreResponse) -> list[tuple[int, Scores]]:
        """Take a message; returns (index, scores) of the sequences that it completed, whose timings are not set yet.

        Raises:
            CorruptPayloadError: on any violation. The decoder must not be used after that.
        """
        kind = message.WhichOneof("message")
        if kind == "batch":
            return self._on_batch(message.batch)
        if self.trailer is not None:
            raise CorruptPayloadError("the score stream goes on after its trailer.")
        if kind == "header":
            self._on_header(message.header)
        elif not self._started:
            raise CorruptPayloadError(f"the score stream starts with {kind or 'an empty message'} instead of a header.")
        elif kind == "sequence":
            self._on_sequence(message.sequence)
        elif kind == "chunk":
            return self._on_chunk(message.chunk)
        elif kind == "trailer":
            self._on_trailer(message.trailer)
        else:
            raise CorruptPayloadError(
                "the score stream holds a message of an unknown kind; client and server may differ in version."
            )
        return []

    def finish(self) -> list[Scores]:
        """All scores in the order of the items, with the server's timings.

        Raises:
            CorruptPayloadError: if the stream ended before its trailer.
        """
        if self.trailer is None:
            raise CorruptPayloadError("the score stream ended before its trailer; ask again.")
        timings = timings_of(self.trailer.timings)
        return [replace(self._results[i], timings=timings) for i in range(len(self._items))]

    def _on_batch(self, batch: pb.ScoreBatch) -> list[tuple[int, Scores]]:
        # An empty batch is refused like an empty chunk; a nested one is not part of the contract.
        if not batch.messages or any(one.WhichOneof("message") == "batch" for one in batch.messages):
            raise CorruptPayloadError("the score stream holds a batch that is empty or contains another batch.")
        return [found for one in batch.messages for found in self.feed(one)]

    def _on_header(self, header: pb.ScoreHeader) -> None:
        if self._started:
            raise CorruptPayloadError("the score stream has two headers.")
        self._started = True
        if self._request_id and header.request_id != self._request_id:
            raise CorruptPayloadError(f"the reply is to request {header.request_id!r}, not to {self._request_id!r}.")
        wanted = len(self._items)
        if header.sequence_count != wanted:
            raise CorruptPayloadError(f"the reply has {header.sequence_count} sequences, but {wanted} were sent.")
        # A replica may have got other weights between its description and this response.
        if self._expected_hash and header.weights_hash != self._expected_hash:
            raise CorruptPayloadError(
                f"the scores come from weights {header.weights_hash!r}, but {self._expected_hash!r} were expected."
            )
        self.weights_hash = header.weights_hash

    def _on_sequence(self, header: pb.SequenceHeader) -> None:
        if self._header is not None:
            raise CorruptPayloadError(f"sequence {self._next} was not complete when the next one began.")
        if header.sequence != self._next or self._next >= len(self._items):
            raise CorruptPayloadError(f"sequence {header.sequence} arrived when sequence {self._next} was expected.")
        # The request may have been damaged on its way: scores of other ids would pass all later checks.
        if header.ids_crc32c != crc32c(token_bytes(self._items[self._next].token_ids)):
            raise CorruptPayloadError(f"sequence {header.sequence} was scored for other token ids than were sent.")
        self._check_specs(header)
        self._header, self._assembly = header, Assembly("a sequence", sum(t.byte_length for t in header.tensors))

    def _check_specs(self, header: pb.SequenceHeader) -> None:
        rows = self._items[self._next].scored_length
        if len(header.tensors) != len(self._layouts):
            raise CorruptPayloadError(
                f"sequence {self._next} has {len(header.tensors)} tensors instead of {len(self._layouts)}."
            )
        for tensor, layout in zip(header.tensors, self._layouts, strict=True):
            name = _role_name(layout.role)
            if tensor.role != layout.role:
                raise CorruptPayloadError(f"a tensor of role {tensor.role} arrived when {name} was expected.")
            if tensor.dtype not in layout.accepted:
                raise CorruptPayloadError(
                    f"{name} has dtype {dtype_name(tensor.dtype) or tensor.dtype}, which the request does not admit."
                )
            if (tensor.rows, tensor.cols) != (rows, layout.cols):
                raise CorruptPayloadError(
                    f"{name} has shape [{tensor.rows}, {tensor.cols}] instead of [{rows}, {layout.cols}]."
                )
            plain = byte_length(tensor.dtype, rows, layout.cols)
            fits = tensor.byte_length == plain
            # The encoder compresses only if that saves bytes, so the plain size bounds what is allocated here.
            if tensor.compression == pb.COMPRESSION_ZSTD:
                fits = 0 < tensor.byte_length < plain
            if not fits:
                raise CorruptPayloadError(
                    f"{name} announces {tensor.byte_length} bytes, but its shape and dtype take {plain}."
                )

    def _on_chunk(self, chunk: pb.Chunk) -> list[tuple[int, Scores]]:
        if self._header is None:
            raise CorruptPayloadError("a chunk arrived that belongs to no sequence.")
        self._assembly.add(chunk)
        if not self._assembly.complete:
            return []
        parts: list[Buffer] = []
        start = 0
        for tensor in self._header.tensors:
            parts.append(self._assembly.buffer[start : start + tensor.byte_length])
            start += tensor.byte_length
        return self._complete(self._header, parts)

    def _complete(self, header: pb.SequenceHeader, parts: Sequence[Buffer]) -> list[tuple[int, Scores]]:
        arrays = {}
        for tensor, data in zip(header.tensors, parts, strict=True):
            if crc32c(data) != tensor.crc32c:
                raise CorruptPayloadError(f"the checksum of {_role_name(tensor.role)} does not match; ask again.")
            plain = unpack(data, tensor.compression, byte_length(tensor.dtype, tensor.rows, tensor.cols))
            array = decode_tensor(plain, tensor.dtype, tensor.rows, tensor.cols)
            # In a shared buffer a tensor may begin at any byte; torch and many of numpy's loops need alignment.
            arrays[int(tensor.role)] = np.require(array, requirements=["A"])
        scores = self._scores(arrays, sum(len(data) for data in parts))
        index = self._next
        self._results[index] = scores
        self._header, self._assembly = None, Assembly("a sequence", 0)
        self._next += 1
        return [(index, scores)]

    def _scores(self, arrays: dict[int, NDArray[Any]], size: int) -> Scores:
        made = Scores(weights_hash=self.weights_hash, wire_bytes=size)
        if self._spec.kind is PayloadKind.HIDDEN:
            checks.check_hidden(arrays[pb.TENSOR_ROLE_HIDDEN])
            return replace(made, hidden=arrays[pb.TENSOR_ROLE_HIDDEN])
        if self._spec.kind is PayloadKind.FULL:
            checks.check_logits(arrays[pb.TENSOR_ROLE_LOGITS])
            return replace(made, logits=arrays[pb.TENSOR_ROLE_LOGITS])
        sampled = arrays[pb.TENSOR_ROLE_SAMPLED][:, 0]
        if self._spec.kind is PayloadKind.SAMPLED:
            checks.check_log_probs("sampled", sampled)
            return replace(made, sampled=sampled)
        item = self._items[self._next]
        values, log_tail = arrays[pb.TENSOR_ROLE_VALUES], arrays[pb.TENSOR_ROLE_LOG_TAIL][:, 0]
        topk = self._spec.kind is PayloadKind.TOPK
        # Top-k ids are the server's, so they are checked against the vocabulary. Gathered ids are the caller's own and
        # do not travel back.
        ids = arrays[pb.TENSOR_ROLE_IDS] if topk else item.gather_ids
        if ids is None:
            raise CorruptPayloadError("gathered values arrived for a sequence without gather_ids.")
        checks.check_positions(
            sampled,
            item.scored_ids,
            ids,
            values,
            log_tail,
            vocab_size=self._bounds.vocab_size if topk else None,
            tolerance=checks.MASS_TOLERANCE[self._spec.value_dtype],
        )
        return replace(made, sampled=sampled, values=values, ids=ids, log_tail=log_tail)

    def _on_trailer(self, trailer: pb.ScoreTrailer) -> None:
        if self._header is not None or self._next != len(self._items):
            raise CorruptPayloadError(f"the trailer came after {self._next} of {len(self._items)} sequences.")
        self.trailer = trailer


def timings_of(message: pb.Timings) -> Timings:
    """`Timings` from the contract's message."""
    return Timings(
        admission=message.admission_seconds,
        queue=message.queue_seconds,
        batch_wait=message.batch_wait_seconds,
        engine=message.engine_seconds,
        encode=message.encode_seconds,
        send=message.send_seconds,
        total=message.total_seconds,
    )


def _role_name(role: int) -> str:
    return pb.TensorRole.Name(role).removeprefix("TENSOR_ROLE_").lower()  # type: ignore[arg-type]
