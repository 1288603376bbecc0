"""Errors across the wire: an `OpdError` becomes a gRPC status with typed details, and the same class at the client.

The server attaches a `google.rpc.ErrorInfo` with the name of the class. For overload it adds an `OverloadDetail` and
the trailer `grpc-retry-pushback-ms`, which stock gRPC clients obey. Statuses that gRPC itself raises (connection lost,
deadline, message too large) are mapped too.
"""

from collections.abc import Iterable
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from opd.errors import (
    CorruptPayloadError,
    InvalidRequestError,
    OpdError,
    OverloadedError,
    all_errors,
    from_status,
)
from opd.wire.v1 import teacher_pb2 as pb

ERROR_DOMAIN = "opd"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MAX_MESSAGE_CHARS = 1000
# gRPC uses one status for messages that are too large in either direction; only the text tells which side refused.
_OVERSIZE_ANSWER = "CLIENT: Received message larger than max"


class WireStatus(NamedTuple):
    """What a server sends for an error: status code, message and trailing metadata."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def status_of(error: OpdError) -> WireStatus:
    """The gRPC status of an error; UNKNOWN for classes of `opd.errors` that have no status."""
    code = grpc.StatusCode[error.status] if error.status else grpc.StatusCode.UNKNOWN
    message = str(error)[:MAX_MESSAGE_CHARS]
    details = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)]
    status = status_pb2.Status(code=code.value[0], message=message)
    trailers: list[tuple[str, str | bytes]] = []
    if isinstance(error, OverloadedError):
        details.append(pb.OverloadDetail(retry_after_seconds=error.retry_after, **error.usage))
        trailers.append((PUSHBACK_KEY, str(max(1, round(error.retry_after * 1000)))))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers.append((DETAILS_KEY, status.SerializeToString()))
    return WireStatus(code, message, tuple(trailers))


def error_from_rpc(error: grpc.RpcError) -> OpdError:
    """The error of `opd.errors` for a failed call, synchronous or asyncio.

    RESOURCE_EXHAUSTED without an overload detail may be gRPC's own refusal of a message as too large: our request
    becomes `InvalidRequestError`; a message of the server violates the contract and becomes `CorruptPayloadError`.
    INTERNAL, UNKNOWN and codes without a class become `UnavailableError`, because another replica may succeed.
    """
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    message = (error.details() if hasattr(error, "details") else None) or code.name.lower()
    trailers = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return error_from_status(code, message, trailers or ())


def error_from_status(
    code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]] = ()
) -> OpdError:
    """The error for a status code, its message and the trailing metadata; see `error_from_rpc`."""
    info, overload = _details(trailers)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if overload is None and _OVERSIZE_ANSWER in message:
            return CorruptPayloadError(f"the server sent a message that is larger than the contract allows: {message}")
        if overload is None and ("larger than max" in message or "too large" in message):
            return InvalidRequestError(
                f"the request is larger than the transport allows; send fewer sequences at once: {message}"
            )
        return _overloaded(message, overload)
    # Only from our own servers: a proxy in between has reasons of its own.
    if info is not None and info.domain == ERROR_DOMAIN:
        # Several classes share a status (FAILED_PRECONDITION): the reason picks the class, the status cross-checks it.
        for cls in all_errors():
            if cls.__name__ == info.reason and cls.status == code.name:
                return cls(message)
    return from_status(code.name, message)


def _overloaded(message: str, detail: pb.OverloadDetail | None) -> OverloadedError:
    if detail is None:
        return OverloadedError(message)
    usage = {field.name: value for field, value in detail.ListFields() if field.name != "retry_after_seconds"}
    return OverloadedError(message, detail.retry_after_seconds, usage)


def _details(
    trailers: Iterable[tuple[str, str | bytes]],
) -> tuple[error_details_pb2.ErrorInfo | None, pb.OverloadDetail | None]:
    """The typed details in the trailers; damaged ones count as absent."""
    info: error_details_pb2.ErrorInfo | None = None
    overload: pb.OverloadDetail | None = None
    for key, value in trailers:
        if key != DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            for detail in status.details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    info = error_details_pb2.ErrorInfo.FromString(detail.value)
                elif detail.Is(pb.OverloadDetail.DESCRIPTOR):
                    overload = pb.OverloadDetail.FromString(detail.value)
        except DecodeError:
            continue
    return info, overload
