"""What is asked of a teacher and what comes back, as numpy arrays: the Python face of the contract.

Shapes: P prompt tokens, T response tokens, K ids per position, H hidden width, V ids of the vocabulary.
"""

import operator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import InvalidRequestError

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


class PayloadKind(StrEnum):
    """The kinds of teacher signal."""

    SAMPLED = "sampled"
    TOPK = "topk"
    GATHER = "gather"
    HIDDEN = "hidden"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """What a teacher shall return for each response token.

    Attributes:
        kind: the kind of signal.
        k: ids per position for topk and gather, else 0.
        value_dtype: "f16", "f32" or "u16" for top-k and gathered log-probs, "bf16" or "f32" for hidden states.
    """

    kind: PayloadKind
    k: int = 0
    value_dtype: str = "f16"

    def __post_init__(self) -> None:
        # "topk" and NumPy's whole numbers will do; a float is refused here, not by a server.
        object.__setattr__(self, "kind", PayloadKind(self.kind))
        object.__setattr__(self, "k", operator.index(self.k))
        needs_k = self.kind in (PayloadKind.TOPK, PayloadKind.GATHER)
        if needs_k and self.k < 1:
            raise InvalidRequestError(f"payload {self.kind} needs k >= 1, but k is {self.k}.")
        if not needs_k and self.k:
            raise InvalidRequestError(f"payload {self.kind} takes no k, but k is {self.k}; leave it out.")
        allowed = {PayloadKind.HIDDEN: ("bf16", "f32")}.get(self.kind, ("f16", "f32", "u16"))
        if self.value_dtype not in allowed:
            raise InvalidRequestError(
                f"payload {self.kind} cannot carry {self.value_dtype!r} values; use one of {', '.join(allowed)}."
            )

    @classmethod
    def sampled(cls) -> "PayloadSpec":
        """Log-prob of the response token, f32: 4 bytes per token."""
        return cls(PayloadKind.SAMPLED)

    @classmethod
    def topk(cls, k: int, value_dtype: str = "f16") -> "PayloadSpec":
        """The teacher's k most likely ids with log-probs, log tail mass, and the response token's log-prob."""
        return cls(PayloadKind.TOPK, k, value_dtype)

    @classmethod
    def gather(cls, k: int, value_dtype: str = "f16") -> "PayloadSpec":
        """Log-probs at k ids of the caller's choice per position, log tail mass, the response token's log-prob."""
        return cls(PayloadKind.GATHER, k, value_dtype)

    @classmethod
    def hidden(cls, value_dtype: str = "bf16") -> "PayloadSpec":
        """Final hidden states after the final norm; the head is fetched once."""
        return cls(PayloadKind.HIDDEN, 0, value_dtype)

    @classmethod
    def named(cls, kind: str, k: int, value_dtype: str = "") -> "PayloadSpec":
        """A payload by the name of its kind; `k` counts for topk and gather, and "" is the kind's default type."""
        kind = PayloadKind(kind)
        takes_k = kind in (PayloadKind.TOPK, PayloadKind.GATHER)
        return cls(kind, k if takes_k else 0, value_dtype or ("bf16" if kind is PayloadKind.HIDDEN else "f16"))

    @classmethod
    def full(cls) -> "PayloadSpec":
        """Logits over the whole vocabulary, f32; tests only."""
        return cls(PayloadKind.FULL)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreItem:
    """One sequence to score.

    Attributes:
        token_ids: [P + T] uint32, or a list; prompt then response.
        prompt_length: P, at least 1; T is at least 1.
        gather_ids: [N, K] uint32, distinct within a row, for payload gather; else None. N counts the scored positions.
        spans: (start, end) of the response positions to score, ascending and apart; the scores hold these N = sum(end -
            start) positions alone, in order. Empty: all, N = T.
    """

    token_ids: U32
    prompt_length: int
    gather_ids: U32 | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Lists, as tokenizers give them, and NumPy's whole numbers will do; a float is refused here, not by a server.
        if not isinstance(self.token_ids, np.ndarray):
            object.__setattr__(self, "token_ids", np.atleast_1d(np.asarray(self.token_ids)))
        object.__setattr__(self, "prompt_length", operator.index(self.prompt_length))

    @property
    def response_length(self) -> int:
        """T, the number of response tokens."""
        return len(self.token_ids) - self.prompt_length

    @property
    def scored_length(self) -> int:
        """N, the number of scored positions."""
        return sum(end - start for start, end in self.spans) if self.spans else self.response_length

    @property
    def scored_ids(self) -> U32:
        """[N] uint32: the response tokens at the scored positions."""
        return self.pick(self.response_ids)

    def pick(self, rows: NDArray[Any]) -> NDArray[Any]:
        """[N, ...]: of [T, ...] the rows at the scored positions."""
        return np.concatenate([rows[start:end] for start, end in self.spans]) if self.spans else rows

    @property
    def response_ids(self) -> U32:
        """[T] uint32: the response."""
        return self.token_ids[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, seconds, as the server measured it; the parts add up to `total`."""

    admission: float = 0.0
    queue: float = 0.0
    batch_wait: float = 0.0
    engine: float = 0.0
    encode: float = 0.0
    send: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A teacher's signal for one sequence; fields that the payload does not carry are None.

    All log-probs are natural, normalised over the teacher's full vocabulary at the requested temperature. Where an item
    has spans, T counts their positions alone; see `opd.wire.spans`.

    Attributes:
        sampled: [T] float32, log-prob of each response token (sampled, topk, gather).
        values: [T, K] float16 or float32, log-probs at `ids`; descending for topk, the caller's order for gather.
        ids: [T, K] uint32, for topk the teacher's ids, for gather the caller's.
        log_tail: [T] float32, log mass outside the K ids; -inf when there is none.
        hidden: [T, H] float32, or bfloat16 as its bits in uint16 (numpy has no bfloat16).
        logits: [T, V] float32, already divided by the temperature.
        weights_hash: hash of the weights that produced the numbers.
        wire_bytes: bytes of tensors received for this sequence.
        timings: the server's, shared by the sequences of one request.
        unasked: response positions that were not asked for and hold placeholders; see `opd.wire.spans.put_back`.
    """

    sampled: F32 | None = None
    values: NDArray[np.float16] | F32 | None = None
    ids: U32 | None = None
    log_tail: F32 | None = None
    hidden: NDArray[np.uint16] | F32 | None = None
    logits: F32 | None = None
    weights_hash: str = ""
    wire_bytes: int = 0
    timings: Timings = field(default_factory=Timings)
    unasked: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A teacher's output head in transit: what `opd.heads.OutputHead`, which computes the logits, is made of.

    Attributes:
        weight: [V, H] float32, or bfloat16/float16 bits as uint16/float16 (see `dtype`).
        bias: [V] or None.
        dtype: "f32", "f16" or "bf16".
        logit_scale: multiplies the projection, 1.0 for none.
        soft_cap: 0.0 for none.
        hash: content hash, equal heads have equal hashes.
    """

    weight: NDArray[np.generic]
    bias: NDArray[np.generic] | None
    dtype: str
    logit_scale: float
    soft_cap: float
    hash: str
