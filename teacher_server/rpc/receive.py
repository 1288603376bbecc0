"""Receiving a request: within a byte budget and a time limit, and checked before it is parsed.

The interceptor presents every method to gRPC as a stream of requests, so nothing of a message is read before the caller
is known: until `receive` reads it, the transport holds at most a flow-control window per stream. gRPC does not announce
the size of a message, so every call that is receiving counts as one of the largest size.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from opd.errors import DeadlineError, InvalidRequestError, OverloadedError
from teacher_server.calls.call_slots import RETRY_SECONDS, WaitingSlots
from teacher_server.calls.caller import Caller
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.settings import ServerSettings

Parse = Callable[[bytes], Message]
Read = TypeVar("Read")

OVERSIZE_BYTES = 64 * 1024
"""Requests that exceed the limit by up to this much are still read, so that the error can name both size and limit."""

UNAUTHENTICATED_MESSAGES = 4
"""Requests that may be received at once from callers that are not authorised and may only ask for health."""

UNAUTHENTICATED_SECONDS = 5.0
"""Seconds that such a request may take to arrive."""

OTHER_FIELDS = 64
"""Allowance for the fields of a message other than its sequences: more than any message of the contract has."""


class RequestReceiver:
    """Receives the single request of a call.

    Args:
        settings: the server's settings.
        metrics: counts refused calls.

    Attributes:
        received_bytes: bytes of all messages since the start.
    """

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._max_bytes = settings.limits.max_request_bytes
        self._max_fields = settings.limits.max_sequences + OTHER_FIELDS
        self._seconds = settings.calls.receive_seconds
        self._metrics = metrics
        self.received_bytes = 0
        messages = max(1, settings.calls.receive_budget_bytes // (self._max_bytes + OVERSIZE_BYTES))
        # A caller gets at most a quarter of the slots, so that it cannot lock out all others.
        self._authorised = WaitingSlots(messages, -(-messages // 4))
        self._unauthenticated = WaitingSlots(UNAUTHENTICATED_MESSAGES, UNAUTHENTICATED_MESSAGES // 2)

    @property
    def receiving(self) -> int:
        """Requests that are being received or parsed."""
        return self._authorised.used + self._unauthenticated.used

    async def receive(
        self, context: "grpc.aio.ServicerContext[Any, Any]", caller: Caller, parse: Parse | None
    ) -> Message | bytes:
        """Receives and parses the message of a call; raises as `read` does."""
        return await self.read(caller, context.read, lambda raw: self._parse(raw, parse))

    async def read(self, caller: Caller, read: Callable[[], Awaitable[Any]], parse: Callable[[Any], Read]) -> Read:
        """Receives and parses the request of a call, within the memory and the time for requests.

        Args:
            caller: who sends it.
            read: reads it, up to the largest size.
            parse: makes of it what is returned.

        Raises:
            OverloadedError: if too many other requests are being received.
            DeadlineError: if the request does not arrive in time.
            InvalidRequestError: if there is no request, it is too large, or it is not a message of this method.
        """
        slots = self._authorised if caller.authorised else self._unauthenticated
        seconds = self._seconds if caller.authorised else min(self._seconds, UNAUTHENTICATED_SECONDS)
        end = asyncio.get_running_loop().time() + seconds
        arriving = False
        try:
            async with asyncio.timeout_at(end) as limit, slots.wait_for(caller.key):
                arriving = True
                raw = await read()
                limit.reschedule(None)  # the limit is for the network, not for our own parsing
                self.received_bytes += len(raw) if isinstance(raw, bytes) else 0
                return parse(raw)
        except TimeoutError:
            self._metrics.refused_calls.labels("receive_timeout" if arriving else "receive_full").inc()
            if arriving:
                raise DeadlineError(
                    f"the request message did not arrive within {seconds:g} s; send it as soon as the call is open."
                ) from None
            raise OverloadedError(
                "the server is receiving too many requests at once; retry later.", RETRY_SECONDS
            ) from None

    def _parse(self, raw: Any, parse: Parse | None) -> Message | bytes:
        if not isinstance(raw, bytes):  # the caller closed its side, or gRPC refused the message because of its size
            self._metrics.refused_calls.labels("no_request").inc()
            raise InvalidRequestError(
                "the call ended before its request message arrived, or the message was too large to receive."
            )
        if len(raw) > self._max_bytes:
            self._metrics.refused_calls.labels("oversize").inc()
            raise InvalidRequestError(
                f"the request message has {len(raw)} bytes, but at most {self._max_bytes} are allowed; send fewer "
                "sequences at once."
            )
        if not has_at_most(raw, self._max_fields):
            self._metrics.refused_calls.labels("fields").inc()
            raise InvalidRequestError(
                f"the request has more than {self._max_fields} fields; send at most "
                f"{self._max_fields - OTHER_FIELDS} sequences at once."
            )
        if parse is None:
            return raw
        try:
            # Here, whatever its size: protobuf copies with the GIL held, so on a thread it would stop the loop as well,
            # and messages would wait for their turn in memory twice, as bytes and parsed.
            return parse(raw)
        except DecodeError:
            raise InvalidRequestError("the request is not a valid message of this method.") from None


def has_at_most(data: bytes, limit: int) -> bool:
    """Whether a serialised message has at most `limit` top-level fields, counted with their repetitions.

    A field of two bytes becomes an object of eighty when it is parsed, so this reads only the tags and skips the
    contents. At the first byte that is not valid in the wire format it stops and returns True: the parser will refuse
    the message. Groups, which the contract does not use and in which fields could hide, count as too many.
    """
    at = 0
    for _ in range(limit):
        if at >= len(data):
            return True
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            # Not compared with the data: a length beyond its end stops the loop, and the parser refuses the message.
            length, at = _varint(data, at)
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return kind not in (3, 4)
    return at >= len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number and the index after it; an index beyond the data if it does not end within ten bytes."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return 0, len(data) + 1
