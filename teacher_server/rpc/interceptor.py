"""The interceptor that every call passes: authentication, a call slot, the request, and the mapping of exceptions.

Cheap steps come first: the caller is identified by the headers, before any byte of the request is read. On its own,
gRPC would answer requests that do not parse, and exceptions, with INTERNAL or UNKNOWN and a repr. Here requests arrive
as bytes: errors of size and parsing become INVALID_ARGUMENT, an `OpdError` gets its status and typed details, and an
unexpected exception is logged under a random id, which is all that the caller is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from opd.errors import OpdError
from opd.wire.status import WireStatus, status_of
from teacher_server.calls.caller import CALLER, peer_address
from teacher_server.calls.endings import has_left, release
from teacher_server.calls.gate import Gate
from teacher_server.rpc.receive import RequestReceiver

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
        gate: lets calls in.
        receiver: reads and parses requests.
    """

    def __init__(self, gate: Gate, receiver: RequestReceiver) -> None:
        self._gate = gate
        self._receiver = receiver

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
                caller = self._gate.identify(peer_address(context.peer()), context.invocation_metadata(), scope)
                with self._gate.hold(caller, watch=method.endswith("/Watch")):
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
                status = WireStatus(grpc.StatusCode.UNKNOWN, self._gate.unexpected(method), ())
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


def _to_bytes(message: Message | bytes) -> bytes:
    """Serialises a message; bytes are a serialised message already."""
    return message if isinstance(message, bytes) else message.SerializeToString()
