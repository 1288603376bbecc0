"""The contract of teacher.proto in numpy: what a caller asks of a teacher, and what it gets back.

The fleet's client takes `PayloadSpec` and `ScoreItem` and returns `Scores`; nothing here depends on gRPC or torch.

Letters in shapes: P prompt tokens, T response tokens, N scored positions, K ids per position, H width of the hidden
state, V size of the vocabulary. Without spans, N is T.
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
    """The kinds of signal that a teacher can return; each constructor of `PayloadSpec` describes one."""

    SAMPLED = "sampled"
    TOPK = "topk"
    GATHER = "gather"
    HIDDEN = "hidden"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """What a teacher is asked to return for each scored response token.

    Attributes:
        kind: the kind of signal.
        k: ids per position for topk and gather; 0 for the other kinds.
        value_dtype: how values travel: "f16", "f32" or "u16" (affine quantisation per row) for the log-probs of topk
            and gather, "bf16" or "f32" for hidden states. Unused by sampled and full, which are always float32.

    Raises:
        InvalidRequestError: for a k or a value_dtype that the kind does not allow.
    """

    kind: PayloadKind
    k: int = 0
    value_dtype: str = "f16"

    def __post_init__(self) -> None:
        # The string "topk" and NumPy integers are accepted; a float is refused here instead of by the server.
        object.__setattr__(self, "kind", PayloadKind(self.kind))
        object.__setattr__(self, "k", operator.index(self.k))
        needs_k = self.kind in (PayloadKind.TOPK, PayloadKind.GATHER)
        if needs_k and self.k < 1:
            raise InvalidRequestError(f"payload {self.kind} needs k of at least 1, but k is {self.k}.")
        if not needs_k and self.k:
            raise InvalidRequestError(f"payload {self.kind} takes no k, but k is {self.k}; leave it out.")
        allowed = {PayloadKind.HIDDEN: ("bf16", "f32")}.get(self.kind, ("f16", "f32", "u16"))
        if self.value_dtype not in allowed:
            raise InvalidRequestError(
                f"payload {self.kind} cannot carry {self.value_dtype!r} values; use one of {', '.join(allowed)}."
            )

    @classmethod
    def sampled(cls) -> "PayloadSpec":
        """The log-prob of the response token as float32: 4 bytes per token."""
        return cls(PayloadKind.SAMPLED)

    @classmethod
    def topk(cls, k: int, value_dtype: str = "f16") -> "PayloadSpec":
        """The teacher's k most likely ids with log-probs, the log mass outside them, the response token's log-prob."""
        return cls(PayloadKind.TOPK, k, value_dtype)

    @classmethod
    def gather(cls, k: int, value_dtype: str = "f16") -> "PayloadSpec":
        """Log-probs at k ids of the caller's choice, the log mass outside them, and the response token's log-prob."""
        return cls(PayloadKind.GATHER, k, value_dtype)

    @classmethod
    def hidden(cls, value_dtype: str = "bf16") -> "PayloadSpec":
        """The last hidden states, after the final norm, from which `opd.maths.linear_divergence` is exact.

        The head that turns them into logits does not travel with them; it is fetched once (`Head`).
        """
        return cls(PayloadKind.HIDDEN, 0, value_dtype)

    @classmethod
    def named(cls, kind: str, k: int, value_dtype: str = "") -> "PayloadSpec":
        """A payload by the name of its kind; `k` counts for topk and gather, and "" is the kind's default type."""
        kind = PayloadKind(kind)
        takes_k = kind in (PayloadKind.TOPK, PayloadKind.GATHER)
        return cls(kind, k if takes_k else 0, value_dtype or ("bf16" if kind is PayloadKind.HIDDEN else "f16"))

    @classmethod
    def full(cls) -> "PayloadSpec":
        """Logits over the whole vocabulary as float32; for tests, and refused unless the server allows them."""
        return cls(PayloadKind.FULL)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreItem:
    """One sequence to score.

    Attributes:
        token_ids: [P + T] uint32 or a list: the prompt, then the response.
        prompt_length: P, at least 1. T must be at least 1 too.
        gather_ids: [N, K] uint32 for payload gather, distinct within a row; None for other payloads.
        spans: response positions to score, as half-open (start, end) pairs, ascending and without overlap. The scores
            then hold these N positions only, in order. Empty scores the whole response.
    """

    token_ids: U32
    prompt_length: int
    gather_ids: U32 | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Lists, as tokenizers return them, and NumPy integers are accepted; a float is refused here instead of by the
        # server.
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
        """The rows at the scored positions: from [T, ...] to [N, ...]."""
        return np.concatenate([rows[start:end] for start, end in self.spans]) if self.spans else rows

    @property
    def response_ids(self) -> U32:
        """[T] uint32: the response tokens."""
        return self.token_ids[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds as measured by the server; the parts add up to `total`.

    teacher.proto says what each part covers.
    """

    admission: float = 0.0
    queue: float = 0.0
    batch_wait: float = 0.0
    engine: float = 0.0
    encode: float = 0.0
    send: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A teacher's signal for one sequence; tensors that the payload does not carry are None.

    Log-probs are in nats, normalised over the teacher's full vocabulary at the requested temperature. Row t holds the
    prediction of the t-th scored token from everything before it. For an item with spans, T in the shapes counts the
    positions in the spans only; see `opd.wire.spans`.

    Attributes:
        sampled: [T] float32, log-prob of each response token (sampled, topk, gather).
        values: [T, K] float16 or float32, log-probs at `ids`: descending for topk, in the caller's order for gather.
        ids: [T, K] uint32, the teacher's ids for topk, the caller's for gather.
        log_tail: [T] float32, log of the mass outside the K ids; -inf if there is none.
        hidden: [T, H] float32, or bfloat16 as its bits in uint16 (numpy has no bfloat16).
        logits: [T, V] float32, already divided by the temperature.
        weights_hash: hash of the weights that produced the scores.
        wire_bytes: bytes of tensors received for this sequence.
        timings: measured by the server, the same for all sequences of a request.
        unasked: number of response positions that were not asked for and hold placeholders; see
            `opd.wire.spans.put_back`.
        span: [T] int64, for a teacher with another tokenizer: the position at which each token's span begins, -1 for
            tokens without a counterpart; `sampled` sums to the log-prob of a span's text over its tokens. None if every
            token is a token of the teacher's too. Not on the wire.
        ranks: [T] uint32, 1 + the number of ids that are likelier than the response token; not on the wire.
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
    ranks: U32 | None = None
    span: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A teacher's output head as it travels; `opd.heads.OutputHead.received` builds the head that computes logits.

    Attributes:
        weight: [V, H] as `dtype` says: float32, float16, or the bits of bfloat16 in uint16.
        bias: [V] or None.
        dtype: "f32", "f16" or "bf16".
        logit_scale: factor on the projection; 1.0 for none.
        soft_cap: soft-cap of the logits; 0.0 for none.
        hash: hash of the contents; equal heads have equal hashes.
    """

    weight: NDArray[np.generic]
    bias: NDArray[np.generic] | None
    dtype: str
    logit_scale: float
    soft_cap: float
    hash: str
