"""The handlers of `TeacherService`. Score calls are implemented in `teacher_server.calls.score_call`.

A request comes here from `teacher_server.rpc.interceptor`, which has authenticated its caller, given it a slot and
parsed it. Errors that the handlers raise become gRPC statuses there.
"""

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from opd import __version__
from opd.errors import IncompatibleTeacherError
from opd.wire.head import encode_head
from opd.wire.request import check_chunk_bytes
from opd.wire.tokenizer import encode_tokenizer
from opd.wire.types import Head
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from teacher_server.calls.account import serve
from teacher_server.calls.caller import CALLER
from teacher_server.calls.score_call import Shared
from teacher_server.residency.describe import teacher_info, tokenizer_info
from teacher_server.residency.teacher import Teacher
from teacher_server.rpc.sender import Sender
from teacher_server.rpc.stream_call import StreamCall

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TeacherService(teacher_pb2_grpc.TeacherServiceServicer):
    """Serves Describe, Score, GetHead, GetTokenizer and GetLoad.

    Args:
        shared: what all calls of the server share.
        score_call: handles a Score call.
    """

    def __init__(self, shared: Shared, score_call: Callable[..., StreamCall] = StreamCall) -> None:
        self._shared = shared
        self._score_call = score_call
        self._heads: weakref.WeakValueDictionary[str, asyncio.Future[Head]] = weakref.WeakValueDictionary()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Describes one teacher, or all that are loaded."""
        served = self._shared.teachers
        asked = [served.get(request.teacher)] if request.teacher else list(served)
        if request.teacher:
            asked[0].running()  # raises the reason if it cannot be described; a list leaves such a teacher out
        start = request.tokens_from if request.HasField("tokens_from") else None
        return pb.DescribeResponse(
            teachers=[teacher_info(t.info, t.bounds, self._state(t), start) for t in asked if t.worker is not None],
            server_version=__version__,
            instance_id=self._shared.instance_id,
        )

    async def Score(self, request: pb.ScoreRequest, context: Context) -> None:
        """Streams the scores of the request's sequences, in their order."""
        call = self._score_call(
            self._shared,
            request,
            context.write,
            principal=CALLER.get().key,
            seconds_left=context.time_remaining(),
            arrived=time.monotonic(),
        )
        del request  # `call` drops it as soon as it is unpacked
        await serve(self._shared, call, context.invocation_metadata())

    async def GetHead(self, request: pb.GetHeadRequest, context: Context) -> None:
        """Streams the tensors of a teacher's output head."""
        check_chunk_bytes(request.chunk_bytes)
        chunk = request.chunk_bytes or self._shared.settings.transport.chunk_bytes
        sender = Sender(context.write, self._shared.settings.limits.send_timeout_seconds)
        try:
            await self._send_head(request, sender, chunk)
        finally:
            await sender.settle()

    async def _send_head(self, request: pb.GetHeadRequest, sender: Sender, chunk: int) -> None:
        async with self._shared.teachers.use(request.teacher) as teacher:
            identity = teacher.info.head
            if identity is None:
                raise IncompatibleTeacherError(
                    f"teacher {teacher.name!r} does not serve its output head; ask for another payload."
                )
            if request.expected_hash not in ("", identity.hash):
                raise IncompatibleTeacherError(
                    f"teacher {teacher.name!r} has head {identity.hash}, not {request.expected_hash[:128]!r}; call "
                    "Describe again."
                )
            copying = self._copy_of_head(teacher, identity.hash)  # the copy is shared while a call holds a reference
            # Shielded: a caller that hangs up must not cancel the copy for the other calls.
            messages = encode_head(await asyncio.shield(copying), chunk)
            # Each message is made on a thread: checksums and copies of a gigabyte would block the event loop for
            # seconds.
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                await sender.send(message)

    def _copy_of_head(self, teacher: Teacher, content_hash: str) -> "asyncio.Future[Head]":
        """A copy of the head on the host, shared by all calls that are open at the same time.

        The head is large, copying it blocks the engine, and all ranks of a student ask for it at once. The dictionary
        holds the copy weakly, so it is freed with the last call.
        """
        copying = self._heads.get(content_hash)
        if copying is None or (copying.done() and (copying.cancelled() or copying.exception())):
            copying = asyncio.wrap_future(teacher.running().call(lambda engine: engine.head()))
            # If all callers have gone when it fails, reading the exception keeps asyncio from logging it.
            copying.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._heads[content_hash] = copying
        return copying

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> None:
        """Streams what a teacher's tokenizer is made of."""
        check_chunk_bytes(request.chunk_bytes)
        teacher = self._shared.teachers.get(request.teacher)
        teacher.running()  # raises the reason if it cannot be described
        own = teacher.info.tokenizer
        if not own.document:
            raise IncompatibleTeacherError(
                f"teacher {teacher.name!r} has no tokenizer that can be sent: none in its folder, or one with code of "
                "its own; serve it from a folder with a tokenizer.json."
            )
        if request.expected_fingerprint not in ("", own.fingerprint):
            raise IncompatibleTeacherError(
                f"teacher {teacher.name!r} has tokenizer {own.fingerprint}, not "
                f"{request.expected_fingerprint[:128]!r}; call Describe again."
            )
        chunk = request.chunk_bytes or self._shared.settings.transport.chunk_bytes
        sender = Sender(context.write, self._shared.settings.limits.send_timeout_seconds)
        messages = encode_tokenizer(tokenizer_info(own), own.document, chunk)
        try:
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                await sender.send(message)
        finally:
            await sender.settle()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Returns queue lengths, throughput and free budget."""
        shared = self._shared
        return pb.GetLoadResponse(
            teachers=[_load(teacher, self._state(teacher)) for teacher in shared.teachers],
            token_budget_left=max(0, shared.budget.tokens - shared.budget.used.tokens),
            instance_id=shared.instance_id,
        )

    def _state(self, teacher: Teacher) -> int:
        """The state as clients see it. Internally, a draining server's teachers stay READY for the calls in flight."""
        return pb.TEACHER_STATE_DRAINING if self._shared.draining and teacher.serving else teacher.state


def _load(teacher: Any, state: Any) -> pb.TeacherLoad:
    message = pb.TeacherLoad(teacher=teacher.name, state=state)
    if teacher.worker is not None:
        sequences, tokens, running = teacher.worker.load()
        rate = teacher.worker.rate.recent
        message.queued_sequences, message.queued_tokens, message.running_tokens = sequences, tokens, running
        message.tokens_per_second = rate
        message.drain_seconds = (tokens + running) / rate if rate > 0 else 0.0
    return message
