"""A Score call from request to trailer: admit, unpack, queue, then answer each sequence as soon as it is scored.

How an answer travels is the door's affair: `teacher_server.rpc.stream_call` streams it, and other doors derive their
own. All else is the same for every door.

Nothing is unpacked or computed before its budget is reserved, and every reservation is released exactly once, however
the call ends: answered, refused, cancelled by the client, past its deadline, or cut short by a shutdown.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from opd.errors import IncompatibleTeacherError, UnavailableError
from opd.telemetry.tracing import Spans
from opd.wire.bounds import RequestBounds, reply_bytes, unpacked_bytes
from opd.wire.request import ParsedRequest, RequestOutline, outline_score_request, parse_score_request
from opd.wire.types import Scores, Timings
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.admission import Budget, Client, Price, Reservation, check_deadline
from teacher_server.batching.queue import JobTimes
from teacher_server.batching.worker import EngineWorker
from teacher_server.calls.pending import PendingScores, SendWindow
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.residency.teacher import Teacher
from teacher_server.residency.teachers import Teachers
from teacher_server.settings import ServerSettings

SEQUENCE_BYTES = 2048
"""What the server keeps of a sequence beside its ids and scores, most of it Python's objects."""

INLINE_BYTES = 32 * 1024
"""Up to this size, work is done on the event loop; moving it to a thread would cost more than it saves."""


@dataclass(slots=True, eq=False)
class Shared:
    """What all calls of a server share.

    Attributes:
        scoring: number of Score calls in flight.
        draining: whether the server is about to end; clients see this as the teachers' state.
        refusing: whether new Score calls are refused.
    """

    settings: ServerSettings
    teachers: Teachers
    budget: Budget
    metrics: ServerMetrics
    threads: ThreadPoolExecutor
    instance_id: str
    spans: Spans = field(default_factory=Spans)
    scoring: int = 0
    draining: bool = False
    refusing: bool = False


class Stopwatch:
    """Divides the time since a call's arrival among its stages, without gaps or overlaps."""

    def __init__(self, start: float) -> None:
        self.start = self.last = start
        self.parts = dict.fromkeys(("admission", "queue", "batch_wait", "engine", "encode", "send"), 0.0)

    def until(self, stage: str, moment: float) -> None:
        """Counts the time from the last mark to `moment` as `stage`; a moment before the last mark counts nothing."""
        if moment > self.last:
            self.parts[stage] += moment - self.last
            self.last = moment

    def timings(self) -> Timings:
        """The seconds of each stage, and their sum."""
        return Timings(**self.parts, total=self.last - self.start)


class ScoreCall(ABC):
    """A Score call. Its stages are methods, so that tests can stop or spoil a call before and after each.

    Args:
        shared: what the calls of this server share.
        message: the request, not yet validated.
        principal: the key by which the caller's share is counted.
        seconds_left: seconds until the client's deadline; None if it set none.
        arrived: when the call came in, in seconds of the monotonic clock.

    Attributes:
        ranks: whether the answer needs the ranks of the response tokens.
    """

    ranks: bool = False

    def __init__(
        self,
        shared: Shared,
        message: pb.ScoreRequest,
        *,
        principal: str,
        seconds_left: float | None,
        arrived: float,
    ) -> None:
        self._shared = shared
        self._message: pb.ScoreRequest | None = message
        self._principal = principal
        # Every job gets a deadline, after which the queue drops it.
        limit = shared.settings.limits.max_request_seconds
        self.arrived = arrived
        self._deadline = arrived + min(seconds_left if seconds_left is not None else limit, limit)
        self._watch = Stopwatch(arrived)
        self._header_hash = ""
        self.request_id, self.teacher = message.request_id, message.teacher
        self.sequences = len(message.sequences)
        self.payload = message.WhichOneof("payload") or "none"
        self.prompts: list[str] = []
        if shared.settings.log.prompts:
            self.prompts = [sequence.token_ids[:4096].hex() for sequence in message.sequences[:4]]
        self.jobs: list[JobTimes] = []
        self.model_tokens = 0
        self.scored_tokens = 0

    async def run(self) -> Timings:
        """Serves the call; returns where its time went.

        Raises:
            OpdError: a refusal or failure, which becomes the status of the call.
        """
        teachers = self._shared.teachers
        # All that comes before the first `await`, so that a cancellation cannot lose the reservation, and requests that
        # wait to be unpacked are within the budget, however many there are.
        known = teachers.get(self.teacher)
        bounds = known.bounds
        client, prices, reservation = self._admit(bounds, known.running())
        try:
            async with teachers.use(self.teacher) as teacher:
                worker = teacher.running()
                request = await self._parse(bounds, reservation)
                # Early, so that a request for other weights costs no forward pass; `_check_hash` checks the actual
                # scores.
                if request.expected_weights_hash not in ("", teacher.info.weights_hash):
                    raise IncompatibleTeacherError(
                        f"teacher {teacher.name!r} has weights {teacher.info.weights_hash}, not "
                        f"{request.expected_weights_hash}; load those, or expect the ones in use."
                    )
                self._watch.until("admission", time.monotonic())
                window = self._window(request, client, prices, worker)
                try:
                    window.advance()
                    return await self._stream(teacher, request, bounds, window, reservation)
                finally:
                    # Before the reservation: the budget must not be free for others while this call's jobs can still
                    # use it.
                    window.close()
        finally:
            reservation.close()

    def _admit(self, bounds: RequestBounds, worker: EngineWorker) -> tuple[Client, list[Price], Reservation]:
        """Reserve what the request needs; also returns its client and the price of each sequence."""
        message, now = self._unread(), time.monotonic()
        outline = outline_score_request(message, bounds)
        client, tokens = Client(self._principal, message.client), sum(outline.tokens)
        check_deadline(self._deadline, now, worker.before(client, tokens), tokens, worker.rate.admission)
        prices = _prices(outline, bounds)
        replies = [one.reply_bytes for one in prices]
        held = message.ByteSize() + unpacked_bytes(outline.spec, outline.tokens, outline.rows)
        held += len(replies) * SEQUENCE_BYTES + self._answer_bytes(message, outline, replies)
        price = Price(tokens, held + sum(replies))
        return client, prices, self._shared.budget.reserve(client, price, tokens_per_second=worker.rate.admission)

    def _unread(self) -> pb.ScoreRequest:
        """The message, which is dropped once it has been unpacked."""
        if self._message is None:
            raise RuntimeError("the request was unpacked before.")
        return self._message

    async def _parse(self, bounds: RequestBounds, reservation: Reservation) -> ParsedRequest:
        message = self._unread()
        size = message.ByteSize()
        if size <= INLINE_BYTES:
            request = parse_score_request(message, bounds)
        else:
            request = await self._on_thread(parse_score_request, message, bounds)
        self._message = None
        del message
        reservation.release(Price(0, size))
        return request

    def _window(self, request: ParsedRequest, client: Client, prices: list[Price], worker: EngineWorker) -> SendWindow:
        sequences = [
            PendingScores(request, index, client, self._deadline, price, ranks=self.ranks)
            for index, price in enumerate(prices)
        ]
        return SendWindow(worker, sequences, self._shared.settings.limits.stream_window_bytes)

    async def _stream(
        self,
        teacher: Teacher,
        request: ParsedRequest,
        bounds: RequestBounds,
        window: SendWindow,
        reservation: Reservation,
    ) -> Timings:
        for index in range(len(request.items)):
            await self._answer(teacher.name, request, index, bounds, window, reservation)
        return await self._send_trailer()

    async def _answer(
        self,
        teacher: str,
        request: ParsedRequest,
        index: int,
        bounds: RequestBounds,
        window: SendWindow,
        reservation: Reservation,
    ) -> None:
        """Wait for the scores of a sequence, and send them."""
        scores, weights_hash = await self._result(window.first())
        await self._check_hash(request, weights_hash)
        pending = window.drop_first()  # not earlier: `close` cancels what is in the window and not computed yet
        self.model_tokens += pending.price.tokens
        encoded = await self._encode(scores, request, index, bounds, pending.price.reply_bytes)
        del scores  # a slow reader holds the encoded form only
        self._watch.until("encode", time.monotonic())
        await self._send_sequence(teacher, request, index, encoded)
        self.scored_tokens += request.items[index].scored_length
        # Released once the transport has taken it (all but a held batch), so that a slow reader accumulates no scores.
        window.sent(pending.price)
        reservation.release(pending.price)

    async def _result(self, pending: PendingScores) -> tuple[Scores, str]:
        try:
            scores, weights_hash = await pending.future
        finally:
            # A job that failed or was cancelled lacks some of its times; the present replaces them.
            job, now = pending.job, time.monotonic()
            if job.started_at:
                self.jobs.append(job.times())
            self._watch.until("queue", min(job.picked_at or now, now))
            self._watch.until("batch_wait", min(job.started_at or now, now))
            self._watch.until("engine", min(job.ended_at or now, now))
        return scores, weights_hash

    async def _check_hash(self, request: ParsedRequest, weights_hash: str) -> None:
        """Checks that all sequences come from the same, expected weights; sends the header before the first of them."""
        if self._header_hash == "":
            if request.expected_weights_hash not in ("", weights_hash):
                raise IncompatibleTeacherError(
                    "the teacher's weights were replaced while the request was queued; call Describe again."
                )
            self._header_hash = weights_hash
            self._watch.until("encode", time.monotonic())
            await self._send_header(request, weights_hash)
            self._watch.until("send", time.monotonic())
        elif weights_hash != self._header_hash:
            raise UnavailableError(
                "the teacher's weights were replaced between two sequences of the request; send it again."
            )

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._shared.threads, function, *args)

    @abstractmethod
    def _answer_bytes(self, message: pb.ScoreRequest, outline: RequestOutline, replies: Sequence[int]) -> int:
        """Bytes that the answer takes beside the scores, whose sizes are `replies`, until the call ends."""

    @abstractmethod
    async def _send_header(self, request: ParsedRequest, weights_hash: str) -> None:
        """Begins the answer."""

    @abstractmethod
    async def _encode(
        self, scores: Scores, request: ParsedRequest, index: int, bounds: RequestBounds, nbytes: int
    ) -> Any:
        """The scores of a sequence, which take `nbytes`, in the form in which they travel."""

    @abstractmethod
    async def _send_sequence(self, teacher: str, request: ParsedRequest, index: int, encoded: Any) -> None:
        """Sends, or keeps, what `_encode` returned."""

    @abstractmethod
    async def _send_trailer(self) -> Timings:
        """Ends the answer; returns where the call's time went."""


def _prices(outline: RequestOutline, bounds: RequestBounds) -> list[Price]:
    """What each sequence of a request costs, apart from its ids."""
    return [
        Price(tokens, reply_bytes(outline.spec, rows, bounds.vocab_size, bounds.hidden_size))
        for tokens, rows in zip(outline.tokens, outline.rows, strict=True)
    ]
