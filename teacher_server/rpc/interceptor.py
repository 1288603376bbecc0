"""The gate of every call: authentication, parsing, and the one place where exceptions become statuses.

gRPC itself answers bytes that do not parse, and exceptions, with INTERNAL or UNKNOWN and a repr. Here requests reach
the server as bytes: size and parse errors are INVALID_ARGUMENT, known errors get their status and typed details, and
an unexpected exception is logged with an id and answered by a sentence that quotes the id and nothing else.
"""

import asyncio
import secrets
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from opd.errors import AuthError, InvalidRequestError, OpdError, ScopeError
from opd.wire.status import status_of
from teacher_server.observe.logs import log
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.rpc.security import ANONYMOUS, Principal, Tokens

PRINCIPAL: ContextVar[Principal] = ContextVar("principal", default=ANONYMOUS)
"""Who makes the call that is being handled."""

_SCOPES = {
    "/opd.wire.v1.TeacherService/": "score",
    "/opd.wire.v1.AdminService/": "admin",
    "/grpc.health.v1.Health/": "",
}


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every handler of a server.

    Args:
        tokens: of the server.
        metrics: counts failures.
        max_request_bytes: of one message; larger ones are refused before they are parsed.
    """

    def __init__(self, tokens: Tokens, metrics: ServerMetrics, max_request_bytes: int) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._max_bytes = max_request_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a method, wrapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method
        scope = next((scope for prefix, scope in _SCOPES.items() if method.startswith(prefix)), "admin")
        parse = handler.request_deserializer
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                if scope:
                    PRINCIPAL.set(self._authenticate(context, scope))
                return await inner(self._parse(parse, raw), context)
            except OpdError as error:
                await _abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:
                await self._unexpected(context, method)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(call, request_deserializer=None, response_serializer=_to_bytes)

    def _authenticate(self, context: grpc.aio.ServicerContext[Any, Any], scope: str) -> Principal:
        try:
            return self._tokens.authenticate(context.invocation_metadata(), scope)
        except (AuthError, ScopeError) as error:
            reason = "token" if isinstance(error, AuthError) else "scope"
            self._metrics.auth_failures.labels(reason).inc()
            raise

    def _parse(self, parse: Callable[[bytes], Message], raw: bytes) -> Message:
        if len(raw) > self._max_bytes:
            raise InvalidRequestError(
                f"the request message has {len(raw)} bytes, but at most {self._max_bytes} are taken."
            )
        try:
            return parse(raw)
        except DecodeError:
            raise InvalidRequestError("the request is not a valid message of this method.") from None

    async def _unexpected(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        incident = secrets.token_hex(6)
        self._metrics.unexpected_errors.inc()
        log("error", "unexpected error", incident=incident, method=method, trace=traceback.format_exc())
        await context.abort(
            grpc.StatusCode.UNKNOWN, f"the server met an unexpected error; its log has incident {incident}."
        )


def _to_bytes(message: Message | bytes) -> bytes:
    """Serialise a message; bytes are one already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: OpdError) -> None:
    status = status_of(error)
    await context.abort(status.code, status.message, status.trailers)
