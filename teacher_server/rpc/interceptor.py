"""The interceptor that every call passes: authentication, a call slot, the request, and the mapping of exceptions.

Cheap steps come first: the caller is identified by the headers, before any byte of the request is read. On its own,
gRPC would answer requests that do not parse, and exceptions, with INTERNAL or UNKNOWN and a repr. Here requests arrive
as bytes: errors of size and parsing become INVALID_ARGUMENT, an `OpdError` gets its status and typed details, and an
unexpected exception is logged under a random id, which is all that the caller is told.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from opd.errors import AuthError, OpdError, ScopeError
from opd.wire.status import WireStatus, status_of
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.rpc.call_slots import CallSlots
from teacher_server.rpc.caller import CALLER, Caller, peer_address
from teacher_server.rpc.receive import RequestReceiver
from teacher_server.rpc.security import ANONYMOUS, Tokens
from teacher_server.settings import OpenCallSettings

_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_SCOPES = {
    "/opd.wire.v1.TeacherService/": "score",
    "/opd.wire.v1.AdminService/": "admin",
    "/grpc.health.v1.Health/": "",
}


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every handler of a server.

    Args:
        tokens: the server's bearer tokens.
        metrics: counts refused calls and failures.
        receiver: reads and parses requests.
        settings: how many calls may be open.

    Attributes:
        authorised: slots for calls of callers that may use the teachers.
        unauthenticated: slots for the health checks of all others.
        watches: slots for their health watches.
    """

    def __init__(
        self, tokens: Tokens, metrics: ServerMetrics, receiver: RequestReceiver, settings: OpenCallSettings
    ) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._receiver = receiver
        self.authorised = CallSlots(settings.max_calls, round(settings.max_caller_share * settings.max_calls) or 1)
        # Health checks have slots of their own, so that a server at its limit of calls does not look dead to a load
        # balancer.
        self.unauthenticated = CallSlots(
            settings.max_unauthenticated_calls, -(-settings.max_unauthenticated_calls // 4)
        )
        self.watches = CallSlots(settings.max_watches, -(-settings.max_watches // 4))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a method, wrapped.

        Every method is presented to gRPC as if it took a stream of requests: gRPC calls such handlers as soon as
        the headers have arrived, and reads a message only when the handler asks for it.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method
        # A service that is missing from the table needs the strongest scope.
        scope = next((scope for prefix, scope in _SCOPES.items() if method.startswith(prefix)), "admin")
        parse = handler.request_deserializer
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(_: Any, context: Context) -> Any:
            try:
                caller = self._identify(context, scope)
                with self._hold(caller, method):
                    CALLER.set(caller)
                    # Without a variable for the request, which must not stay until the call ends.
                    return await inner(await self._receiver.receive(context, caller, parse), context)
            except OpdError as error:
                status = status_of(error)
                release(error)
            except (asyncio.CancelledError, grpc.aio.AbortError) as error:
                release(error)
                raise
            except Exception as error:
                if has_left(error):
                    release(error)
                    _log.debug("the caller left", extra={"method": method})
                    raise asyncio.CancelledError from None  # which grpcio takes for what it is
                status = self._unexpected(method)
                release(error)
            # Outside the handlers, where the error and the frames that hold the request are gone.
            try:
                await context.abort(*status)
            except grpc.aio.AbortError as error:
                # grpcio keeps it in the context, and raises it again once this returns.
                release(error)
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(call, request_deserializer=None, response_serializer=_to_bytes)

    def _identify(self, context: Context, scope: str) -> Caller:
        """The caller of a call, before anything of its request is read.

        Raises:
            AuthError: if the call needs a token, and has none or an unknown one.
            ScopeError: if its token lacks the scope that the call needs.
        """
        address = peer_address(context.peer())
        try:
            # Health needs no scope, but a probe with a valid token still counts as its caller.
            principal = self._tokens.authenticate(context.invocation_metadata(), scope or "score")
        except (AuthError, ScopeError) as error:
            if not scope:  # health: probes carry no token
                return Caller("", address, authorised=False)
            reason = "token" if isinstance(error, AuthError) else "scope"
            self._metrics.auth_failures.labels(reason).inc()
            raise
        if principal is ANONYMOUS:
            return Caller("", f"address {address}", authorised=scope != "")
        return Caller(principal.name, f"token {principal.name}", authorised=True)

    def _hold(self, caller: Caller, method: str) -> AbstractContextManager[None]:
        slots = self.watches if method.endswith("/Watch") else self.unauthenticated
        if caller.authorised:
            slots = self.authorised
        # For the metric only: `hold` is what refuses.
        reason = slots.missing(caller.key)
        if reason:
            self._metrics.refused_calls.labels(reason).inc()
        return slots.hold(caller.key)

    def _unexpected(self, method: str) -> WireStatus:
        incident = secrets.token_hex(6)
        self._metrics.unexpected_errors.inc()
        _log.exception("unexpected error", extra={"incident": incident, "method": method})
        return WireStatus(
            grpc.StatusCode.UNKNOWN, f"the server met an unexpected error; its log has incident {incident}.", ()
        )


def _to_bytes(message: Message | bytes) -> bytes:
    """Serialises a message; bytes are a serialised message already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def has_left(error: BaseException) -> bool:
    """Whether a call failed because its caller has left or the server has cut it off, which is not an error.

    grpcio cancels the call's task when it learns of that; a read or write that fails before then raises one of these.
    """
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError | grpc.aio.AbortError)


def release(error: BaseException) -> None:
    """Drop the tracebacks of an exception, and of those that it came from, once it has been dealt with.

    A traceback holds the frames of the call, with its request and its scores. Where a frame or a future holds the
    exception in turn, only a full garbage collection would free them, and a server may go for minutes without one.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
