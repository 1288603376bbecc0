"""A Score call over gRPC: each sequence is sent as soon as it is scored, in chunks under flow control."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from opd.errors import OpdError
from opd.wire.bounds import RequestBounds
from opd.wire.encoder import EncodedSequence, chunk_responses, encode_scores, timings_message
from opd.wire.request import ParsedRequest, RequestOutline
from opd.wire.types import Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.calls.pending import PendingScores
from teacher_server.calls.score_call import INLINE_BYTES, ScoreCall, Shared
from teacher_server.rpc.sender import Sender


class StreamCall(ScoreCall):
    """A Score call whose answer is a stream of messages.

    Args:
        shared: what the calls of this server share.
        message: the request, not yet validated.
        write: sends a message, or a serialised one, and waits for flow control.
        call: as for `ScoreCall`.
    """

    def __init__(self, shared: Shared, message: pb.ScoreRequest, write: Callable[[Any], Any], **call: Any) -> None:
        super().__init__(shared, message, **call)
        self._sender = Sender(write, shared.settings.limits.send_timeout_seconds, batches=message.accept_batches)

    async def run(self) -> Timings:
        try:
            return await super().run()
        except OpdError:
            await self._sender.flush()  # the client still gets what was scored before the failure
            raise
        finally:
            # After `run`, which has released teacher, budget and scores by now: a stuck reader can block this.
            await self._sender.settle()

    async def _result(self, pending: PendingScores) -> tuple[Scores, str]:
        if not pending.job.ended_at:
            await self._sender.flush()
        return await super()._result(pending)

    def _answer_bytes(self, message: pb.ScoreRequest, outline: RequestOutline, replies: Sequence[int]) -> int:
        # A chunk that a slow reader has not taken is there three times: as scores, as a message, and in the transport.
        return 2 * min(self._chunk_bytes(message), max(replies))

    async def _send_header(self, request: ParsedRequest, weights_hash: str) -> None:
        count = len(request.items)
        header = pb.ScoreHeader(request_id=request.request_id, weights_hash=weights_hash, sequence_count=count)
        await self._sender.send(pb.ScoreResponse(header=header))

    async def _encode(
        self, scores: Scores, request: ParsedRequest, index: int, bounds: RequestBounds, nbytes: int
    ) -> EncodedSequence:
        transport = self._shared.settings.transport
        encode = functools.partial(
            encode_scores,
            scores,
            request.spec,
            request.items[index].scored_length,
            vocab_size=bounds.vocab_size,
            hidden_size=bounds.hidden_size,
            zstd=request.accept_zstd and transport.zstd,
            pack_ids=transport.pack_ids,
        )
        if nbytes <= INLINE_BYTES:
            return encode()
        return await self._on_thread(encode)

    async def _send_sequence(self, teacher: str, request: ParsedRequest, index: int, encoded: EncodedSequence) -> None:
        shared = self._shared
        # With the checksum of the ids that were scored, so that the client can compare it with what it sent.
        await self._sender.send(encoded.header(index, request.ids_crc32c[index]))
        shared.metrics.sent_bytes.labels(teacher).inc(encoded.nbytes)
        for chunk in chunk_responses(encoded.buffers, self._chunk_bytes(request)):
            await self._sender.send(chunk)
        self._watch.until("send", time.monotonic())

    def _chunk_bytes(self, request: pb.ScoreRequest | ParsedRequest) -> int:
        return request.chunk_bytes or self._shared.settings.transport.chunk_bytes

    async def _send_trailer(self) -> Timings:
        self._watch.until("send", time.monotonic())
        timings = self._watch.timings()
        trailer = pb.ScoreTrailer(
            timings=timings_message(timings), model_tokens=self.model_tokens, scored_tokens=self.scored_tokens
        )
        await self._sender.send(pb.ScoreResponse(trailer=trailer))
        await self._sender.flush()
        return timings
