"""What the fleet needs from a connection to one server. gRPC implements it, and so does the simulator."""

import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb


@dataclass(frozen=True, slots=True)
class Description:
    """A server's description: its teachers by name, the random id of its process, and its software version."""

    teachers: Mapping[str, pb.TeacherInfo]
    instance_id: str
    server_version: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """What one RPC asks of a replica: scores of rows for one teacher with one payload.

    Attributes:
        request_id: unique per attempt.
        info: description of the teacher, by which the response is validated (vocabulary, hidden size).
        items: the rows.
        spec: the payload.
        temperature: divides the logits.
        weights_hash: weights that must produce the numbers.
        check: whether it only compares replicas; the server is not told.
        trace: metadata that makes the server's spans children of the first row's caller; see `opd.telemetry.tracing`.
    """

    request_id: str
    info: pb.TeacherInfo
    items: Sequence[ScoreItem]
    spec: PayloadSpec
    temperature: float
    weights_hash: str
    trace: tuple[tuple[str, str], ...] = ()
    check: bool = False


class RequestIds:
    """Ids of requests, all of the same form, so that a server cannot tell checks from rows by them.

    Args:
        client: name of this client.
    """

    def __init__(self, client: str) -> None:
        self._prefix = f"{client}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def __call__(self) -> str:
        """The next id."""
        return f"{self._prefix}-{next(self._numbers)}"


class ReplicaLink(Protocol):
    """A connection to one server. Its methods raise only `OpdError`s, and may be cancelled at any point."""

    address: str

    async def describe(self, timeout: float) -> Description:
        """The server's description; `timeout` in seconds."""
        ...

    async def load(self, timeout: float) -> pb.GetLoadResponse:
        """The server's load; `timeout` in seconds."""
        ...

    def score(
        self, request: ReplicaRequest, timeout: float | None, idle: float
    ) -> AsyncGenerator[tuple[int, Scores], None]:
        """Yields (index of the row, its validated scores), each row once.

        Args:
            request: the rows and the payload.
            timeout: seconds until the whole call must be over; None for no limit.
            idle: seconds without a message after which the call is given up with `DeadlineError`.
        """
        ...

    async def head(self, teacher: str, expected_hash: str, timeout: float) -> Head:
        """The teacher's output head, checked against `expected_hash`."""
        ...

    async def tokens(self, teacher: str, start: int, timeout: float) -> Sequence[bytes]:
        """Some of the teacher's tokens, from id `start` on; none beyond its last, or if the server cannot send them."""
        ...

    async def tokenizer(self, teacher: str, fingerprint: str, timeout: float) -> bytes:
        """What the teacher's tokenizer, of this fingerprint, is made of: a document of `opd.wire.tokenizer`."""
        ...

    async def update_weights(self, teacher: str, folder: str, timeout: float) -> str:
        """Replace a teacher's weights with those in a folder on the server's host; returns their hash."""
        ...

    async def reconnect(self) -> None:
        """Drop the connection and its backoff, so that the next call connects at once."""
        ...

    async def close(self) -> None:
        """Free everything; calls in progress fail."""
        ...


LinkFactory = Callable[[str], ReplicaLink]
