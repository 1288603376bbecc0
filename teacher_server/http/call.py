"""A Score call whose answer is one body: kept until the last sequence is scored, then sent with the right status."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opd.errors import DeadlineError
from opd.wire.bounds import RequestBounds
from opd.wire.request import ParsedRequest, RequestOutline
from opd.wire.types import Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.calls.score_call import ScoreCall, Shared
from teacher_server.http.question import Question

INLINE_BYTES = 2048
"""Up to this size, scores are written as JSON on the event loop."""

PIECE_BYTES = 64 * 1024

Send = Callable[[dict[str, Any]], Awaitable[None]]


class BodyCall(ScoreCall):
    """A Score call that is answered with one JSON body.

    Args:
        shared: what the calls of this server share.
        question: what is asked.
        send: sends an ASGI message, under flow control.
        call: as for `ScoreCall`.

    Attributes:
        answered: whether all of the answer has been handed to the transport.
    """

    def __init__(self, shared: Shared, question: Question, send: Send, **call: Any) -> None:
        super().__init__(shared, question.message(), **call)
        self._question = question
        self._send_message = send
        self._answers: list[list[bytes]] = []
        self.ranks = question.ranks
        self.answered = False

    def _answer_bytes(self, message: pb.ScoreRequest, outline: RequestOutline, replies: Sequence[int]) -> int:
        return self._question.kept_bytes + sum(self._question.row_bytes * rows + 4096 for rows in outline.rows)

    async def _send_header(self, request: ParsedRequest, weights_hash: str) -> None:
        """Nothing is sent before the last sequence is scored."""

    async def _encode(
        self, scores: Scores, request: ParsedRequest, index: int, bounds: RequestBounds, nbytes: int
    ) -> list[bytes]:
        if nbytes <= INLINE_BYTES:
            return self._question.render(index, scores, self._header_hash)
        written: list[bytes] = await self._on_thread(self._question.render, index, scores, self._header_hash)
        return written

    async def _send_sequence(self, teacher: str, request: ParsedRequest, index: int, encoded: list[bytes]) -> None:
        self._answers.append(encoded)

    async def _send_trailer(self) -> Timings:
        self._watch.until("encode", time.monotonic())
        before, behind = self._question.frame(self._header_hash)
        parts = [before]
        for answer in self._answers:
            parts += [*answer, b","]
        parts[-1] = behind
        size = sum(map(len, parts))
        self._shared.metrics.sent_bytes.labels(self.teacher).inc(size)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            for at in range(0, len(part), PIECE_BYTES):
                await self._send({"type": "http.response.body", "body": part[at : at + PIECE_BYTES], "more_body": True})
        self.answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._watch.until("send", time.monotonic())
        return self._watch.timings()

    async def _send(self, message: dict[str, Any]) -> None:
        limit = self._shared.settings.limits.send_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await self._send_message(message)
        except TimeoutError:
            raise DeadlineError(
                f"the client read nothing for {limit:g} s; read faster, or ask for fewer sequences at once."
            ) from None
