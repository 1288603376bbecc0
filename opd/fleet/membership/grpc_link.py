"""The connection to one teacher server over gRPC: one channel, one attempt per call, every response validated."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from opd.errors import (
    AuthError,
    CorruptPayloadError,
    DeadlineError,
    IncompatibleTeacherError,
    OpdError,
    UnavailableError,
)
from opd.fleet.membership.link import Description, ReplicaLink, ReplicaRequest
from opd.fleet.settings import CallSettings
from opd.wire.bounds import RequestBounds
from opd.wire.channel import ClientSecurity, open_channel, proxy_for
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.head import HeadStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.spans import cut, whole
from opd.wire.status import error_from_rpc
from opd.wire.tokenizer import TokenizerStreamDecoder
from opd.wire.types import Head, Scores
from opd.wire.v1 import admin_pb2
from opd.wire.v1 import teacher_pb2 as pb

M = TypeVar("M", bound=Message)

_TEACHER = "/opd.wire.v1.TeacherService/"
_ADMIN = "/opd.wire.v1.AdminService/"
_TLS_SIGNS = ("handshake", "ssl", "certificate", "tls", "hostname verification")
_NOISE = re.compile(r"failed to connect to all addresses; last error: \w+: (ipv[46]:\S+: )?|: OK$|SSL_ERROR_SSL: \S+ ")


class GrpcLink(ReplicaLink):
    """A `ReplicaLink` over a gRPC channel with the options of `opd.wire.channel`.

    Args:
        address: "host:port" or "unix:path".
        security: TLS and credentials.
        calls: chunk size and compression.
        client: name for fair queueing and metrics on the server.
    """

    def __init__(self, address: str, security: ClientSecurity, calls: CallSettings, client: str) -> None:
        self.address = address
        self._security = security
        self._calls = calls
        self._client = client
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._answered = False

    def _method(self, name: str, *, stream: bool) -> Any:
        """A method, by its full name, that returns responses as bytes.

        The generated stub would parse them itself; for bytes that are not a message, gRPC then logs a traceback and
        returns None.
        """
        if self._channel is None:
            self._channel = open_channel(self.address, self._security)
        if name not in self._methods:
            make = self._channel.unary_stream if stream else self._channel.unary_unary
            self._methods[name] = make(name, request_serializer=_serialise)
        return self._methods[name]

    async def describe(self, timeout: float) -> Description:
        answer = await self._unary(_TEACHER + "Describe", pb.DescribeRequest(), pb.DescribeResponse, timeout)
        return Description({info.name: info for info in answer.teachers}, answer.instance_id, answer.server_version)

    async def load(self, timeout: float) -> pb.GetLoadResponse:
        return await self._unary(_TEACHER + "GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse, timeout)

    async def score(
        self, request: ReplicaRequest, timeout: float | None, idle: float
    ) -> AsyncGenerator[tuple[int, Scores], None]:
        """See `ReplicaLink.score`. The last row carries the server's timings of the whole request."""
        # A pool may contain replicas that can only score whole responses.
        items = request.items if request.info.supports_spans else [whole(item) for item in request.items]
        message = build_score_request(
            items,
            request.spec,
            teacher=request.info.name,
            request_id=request.request_id,
            temperature=request.temperature,
            expected_weights_hash=request.weights_hash,
            accept_zstd=self._calls.zstd,
            accept_batches=True,
            chunk_bytes=self._calls.chunk_bytes,
            client=self._client,
        )
        decoder = ScoreStreamDecoder(
            items,
            request.spec,
            RequestBounds.from_info(request.info),
            request_id=request.request_id,
            expected_weights_hash=request.weights_hash,
        )
        last = len(request.items) - 1
        metadata = self._security.metadata() + request.trace
        stream = self._method(_TEACHER + "Score", stream=True)(message, timeout=timeout, metadata=metadata)
        async for part in self._messages(stream, pb.ScoreResponse, idle):
            for index, scores in decoder.feed(part):
                # The last row is held until the trailer, because a stream without one is incomplete.
                if index < last:
                    yield index, scores if items is request.items else cut(scores, request.items[index])
        scores = decoder.finish()[last]
        yield last, scores if items is request.items else cut(scores, request.items[last])

    async def head(self, teacher: str, expected_hash: str, timeout: float) -> Head:
        request = pb.GetHeadRequest(teacher=teacher, expected_hash=expected_hash, chunk_bytes=self._calls.chunk_bytes)
        decoder = HeadStreamDecoder(expected_hash)
        await self._feed(decoder, "GetHead", request, pb.GetHeadResponse, timeout)
        return decoder.finish()

    async def tokens(self, teacher: str, start: int, timeout: float) -> Sequence[bytes]:
        request = pb.DescribeRequest(teacher=teacher, tokens_from=start)
        answer = await self._unary(_TEACHER + "Describe", request, pb.DescribeResponse, timeout)
        return [token for info in answer.teachers if info.name == teacher for token in info.tokenizer.tokens]

    async def tokenizer(self, teacher: str, fingerprint: str, timeout: float) -> bytes:
        request = pb.GetTokenizerRequest(
            teacher=teacher, expected_fingerprint=fingerprint, chunk_bytes=self._calls.chunk_bytes
        )
        decoder = TokenizerStreamDecoder(fingerprint)
        await self._feed(decoder, "GetTokenizer", request, pb.GetTokenizerResponse, timeout)
        return decoder.finish()

    async def update_weights(self, teacher: str, folder: str, timeout: float) -> str:
        """See `ReplicaLink.update_weights`; needs a token with the scope `admin`."""
        request = admin_pb2.UpdateWeightsRequest(teacher=teacher, folder=folder)
        answer = await self._unary(_ADMIN + "UpdateWeights", request, admin_pb2.UpdateWeightsResponse, timeout)
        return answer.weights_hash

    async def reconnect(self) -> None:
        # Removed before it is closed, so that a call in between opens a new one.
        channel, self._channel, self._methods = self._channel, None, {}
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        await self.reconnect()

    async def _unary(self, method: str, request: Message, kind: type[M], timeout: float) -> M:
        try:
            call = self._method(method, stream=False)
            data = await call(request, timeout=timeout, metadata=self._security.metadata())
        except grpc.RpcError as error:
            raise self._named(error) from error
        self._answered = True
        return self._parsed(kind, data)

    def _parsed(self, kind: type[M], data: bytes) -> M:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise CorruptPayloadError(
                f"replica {self.address} sent {len(data)} bytes that are not a message of the contract; its version "
                "may differ."
            ) from error

    async def _feed(self, decoder: Any, method: str, request: Message, kind: type[M], timeout: float) -> None:
        """Feed the messages of a teacher's stream to a decoder."""
        stream = self._method(_TEACHER + method, stream=True)(
            request, timeout=timeout, metadata=self._security.metadata()
        )
        async for message in self._messages(stream, kind, timeout):
            decoder.feed(message)

    async def _messages(self, stream: Any, kind: type[M], idle: float) -> AsyncGenerator[M, None]:
        """The messages of a stream, which is cancelled when the reader leaves, early or not."""
        try:
            while True:
                # A limit between messages, not overall: a long response that keeps coming is healthy, silence is not.
                async with asyncio.timeout(idle):
                    data = await stream.read()
                if data is grpc.aio.EOF:
                    return
                yield self._parsed(kind, data)
        except TimeoutError as error:
            raise DeadlineError(
                f"replica {self.address} sent nothing for {idle:.3g} s; it is stuck, or calls.attempt_seconds is too "
                "short."
            ) from error
        except grpc.RpcError as error:
            raise self._named(error) from error
        except asyncio.CancelledError as error:
            # gRPC raises CancelledError for the calls of a channel that is closed. Only a cancellation of this task is
            # a real one: swallowing it would keep the task alive, and passing gRPC's on would end a task that was not
            # cancelled.
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise UnavailableError(
                    f"the connection to replica {self.address} was closed while a call was open."
                ) from error
            raise
        finally:
            stream.cancel()

    def _named(self, error: grpc.RpcError) -> OpdError:
        """The error as one of `opd.errors`, with the replica's address and, for common mistakes, the fix."""
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return IncompatibleTeacherError(
                f"replica {self.address} does not know this call, because its version is older than this client's; "
                "update the server."
            )
        found = error_from_rpc(error)
        text = _NOISE.sub("", str(found).rstrip("."))
        if isinstance(found, UnavailableError):
            lower = text.lower()
            # Without TLS, a failed handshake is that of HTTP/2: the server is overloaded, and no credential is wrong.
            if self._security.uses_tls and any(sign in lower for sign in _TLS_SIGNS):
                return AuthError(
                    f"replica {self.address} and this client do not agree on TLS: {text}; check ca_file, server_name "
                    "and whether the server uses TLS at all."
                )
            if "socket closed" in lower:
                # What has answered once asks for no other credentials.
                cause = "perhaps because" if not self._answered else "although it has answered before:"
                text += f", {cause} the server {self._closed_why()}"
            elif "failed parsing http/2" in lower:
                text += (
                    ", because what answers there does not speak gRPC; check the port, which may be that of the metrics"
                )
            if proxy := proxy_for(self.address):
                text += f", through the proxy of {proxy} (name the host in no_proxy if it is to be reached directly)"
            return UnavailableError(f"replica {self.address} cannot be reached, or dropped the connection: {text}.")
        if isinstance(found, AuthError):
            return AuthError(
                f"replica {self.address} refuses this client's credentials: {text}; renew the token or certificate."
            )
        if isinstance(found, CorruptPayloadError):
            return CorruptPayloadError(f"replica {self.address}: {text}.")
        return found

    def _closed_why(self) -> str:
        """Why a server may close a connection without an error: what it requires, and the setting that provides it."""
        if self._answered:
            return "has ended, or the network to it is cut"
        if not self._security.uses_tls:
            return "expects TLS: set ca_file then"
        if self._security.cert_file is None:
            return "asks for a client certificate: set cert_file and key_file then"
        return f"does not trust {self._security.cert_file}: use a certificate that its client_ca has signed then"


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()
