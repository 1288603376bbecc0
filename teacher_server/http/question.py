"""What a request of any route asks for, and the fields that are our own: the object `opd` of a body.

Clients of other servers ignore these fields and need none of them.
"""

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import InvalidRequestError
from opd.wire.bounds import MAX_NAME_CHARS
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.http.numbers import npy

Render = Callable[[int, Scores, str], list[bytes]]


@dataclass(frozen=True, slots=True)
class Extras:
    """Our own fields.

    Attributes:
        temperature: divides the teacher's logits; None if the field is missing.
        log_tail: whether the answer holds the log mass outside the listed ids.
        expected_weights_hash: hash that the teacher's weights must have; "" for any.
    """

    temperature: float | None = None
    log_tail: bool = False
    expected_weights_hash: str = ""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Extras":
        """The fields of a body.

        Raises:
            InvalidRequestError: for an unknown field or a value of the wrong type.
        """
        given = body.get("opd") or {}
        known = {"temperature", "log_tail", "expected_weights_hash"}
        if not isinstance(given, dict) or set(given) - known:
            raise InvalidRequestError(f"opd must be an object with some of {', '.join(sorted(known))}.")
        tail, expected = given.get("log_tail", False), given.get("expected_weights_hash", "")
        if not isinstance(tail, bool) or not isinstance(expected, str) or len(expected) > MAX_NAME_CHARS:
            raise InvalidRequestError("opd.log_tail must be true or false, and opd.expected_weights_hash a hash.")
        temperature = given.get("temperature")
        return cls(None if temperature is None else number(temperature, "opd.temperature"), tail, expected)


@dataclass(slots=True)
class Question:
    """A request, in the terms of the contract, and how its answer is written.

    Attributes:
        teacher: name of the teacher.
        items, spec, temperature: as in a `ScoreRequest`.
        render: the JSON of a sequence's answer, in pieces, from its index, its scores and the weights hash.
        frame: what stands before and behind the answers of the sequences, from the weights hash.
        row_bytes: most bytes of an answer for a scored position; a sequence may take 4096 more.
        ranks: whether the answer holds the rank of each token.
    """

    teacher: str
    items: list[ScoreItem]
    spec: PayloadSpec
    render: Render
    frame: Callable[[str], tuple[bytes, bytes]]
    row_bytes: int
    temperature: float = 1.0
    ranks: bool = False
    expected_weights_hash: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the ids that are kept until the answer is written: those to score also as they were asked for."""
        return sum(i.token_ids.nbytes + (0 if i.gather_ids is None else 3 * i.gather_ids.nbytes) for i in self.items)

    def message(self) -> pb.ScoreRequest:
        """The question as a message of the contract, to be checked like any other."""
        return build_score_request(
            self.items,
            self.spec,
            teacher=self.teacher,
            request_id=self.request_id,
            temperature=self.temperature,
            expected_weights_hash=self.expected_weights_hash,
        )


def number(value: Any, name: str) -> float:
    """A finite number of a request.

    Raises:
        InvalidRequestError: if it is something else.
    """
    if type(value) not in (int, float) or (type(value) is int and abs(value) > 2**53) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, but it is a {type(value).__name__} out of range.")
    return float(value)


def request_id_of(value: Any, name: str) -> str:
    """The id of a request, or a new one if it is missing.

    Raises:
        InvalidRequestError: if it is not a string of 1 to 128 characters.
    """
    if value is None:
        return uuid.uuid4().hex
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        raise InvalidRequestError(f"{name} must be a string of 1 to {MAX_NAME_CHARS} characters.")
    return value


def tail_fields(scores: Scores, added: Any = None) -> dict[str, Any]:
    """Our own fields of an answer: the log-probs of the tokens, and the log mass outside the listed ids.

    Args:
        scores: the scores.
        added: [N, K] which of the ids were not asked for, so that they count as outside; None for none.
    """
    own = {} if scores.sampled is None else {"sampled": npy(scores.sampled)}
    tail = scores.log_tail
    if tail is None or scores.values is None:
        return own
    if added is not None and added.any():
        inside = np.where(added, scores.values.astype(np.float64), -np.inf)
        tail = np.logaddexp(tail.astype(np.float64), np.logaddexp.reduce(inside, axis=1)).astype(np.float32)
    return own | {"log_tail": npy(tail)}
