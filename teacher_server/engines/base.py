"""The protocol between the server and whatever runs the teacher model.

An engine computes; it does not depend on gRPC, queues or clients. It is called from one worker thread, with a batch
that the queue put together under a token budget. What an engine cannot do exactly is absent from its `EngineInfo` and
is refused before it gets here, never approximated silently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from opd.errors import UnavailableError
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What identifies a tokenizer; see `opd.wire.fingerprint`.

    Attributes:
        fingerprint: hex SHA-256 over the map from id to bytes.
        chat_template_hash: hex SHA-256 of the chat template, or "".
        size: number of ids the tokenizer can produce.
        eos_id, bos_id, pad_id: special ids, or -1.
    """

    fingerprint: str
    chat_template_hash: str
    size: int
    eos_id: int = -1
    bos_id: int = -1
    pad_id: int = -1


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """Describes the output head without its weights; `hash` is the content hash of weight and bias."""

    hash: str
    hidden_size: int
    logit_scale: float
    soft_cap: float
    dtype: str
    has_bias: bool


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine and its model are and can do.

    Attributes:
        engine: name and version, for example "transformers 5.19.0".
        model: path or hub id the weights came from.
        weights_hash: hex hash of the weights now in use.
        compute_dtype: "f32", "bf16" or "f16".
        vocab_size: V, the ids that count: log-probs are normalised over them and every token id is below; see
            `teacher_server.engines.loading.counted_ids`.
        tokenizer: identity of the tokenizer.
        head: identity of the head, or None when hidden states are not served.
        payloads: payload kinds served exactly.
        supports_temperature: whether temperatures other than 1 are applied.
        max_sequence_tokens: longest prompt plus response, tokens.
        max_k: largest k of topk and gather.
        deterministic: whether a row's numbers are bit-equal whatever it is batched with.
        padding_rows: rows of the model's head beyond V, cut off before anything is normalised or chosen.
        stop_token_ids: ids that end a response, ascending; see `teacher_server.engines.loading.load_stop_token_ids`.
        spans: whether items with spans are scored, at their positions alone; without it none comes.
    """

    engine: str
    model: str
    weights_hash: str
    compute_dtype: str
    vocab_size: int
    tokenizer: TokenizerIdentity
    head: HeadIdentity | None
    payloads: frozenset[PayloadKind]
    supports_temperature: bool
    max_sequence_tokens: int
    max_k: int
    deterministic: bool = False
    padding_rows: int = 0
    stop_token_ids: tuple[int, ...] = ()
    spans: bool = False


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One sequence in an engine batch.

    Attributes:
        item: ids, prompt length, spans and, for gather, the ids to gather; already validated.
        spec: the payload; may differ between items of one batch.
        temperature: divides the logits; not applied to hidden states.
        cancelled: polled between forward passes; a cancelled item may be skipped (its result is then None).
    """

    item: ScoreItem
    spec: PayloadSpec
    temperature: float = 1.0
    cancelled: Callable[[], bool] = field(default=_never)


Exchange = Callable[[], None]
"""Swaps prepared weights with those in use, all or nothing; a second call swaps them back."""


class Engine(Protocol):
    """Runs one teacher model."""

    @property
    def info(self) -> EngineInfo:
        """Identity and capabilities; changes when weights are replaced."""

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Score a batch: one result per item in order, None where the item was cancelled.

        Raises:
            NonFiniteError: when the model produced NaN or infinity for an item that asked for log-probs.
        """

    def head(self) -> Head:
        """The output head, for callers that take hidden states."""

    def memory_bytes(self) -> int:
        """Bytes that the weights take where they compute; 0 when the engine cannot say."""

    def prepare_weights(self, folder: Path) -> Exchange:
        """Read and check weights of the same architecture from a safetensors folder; those in use stay.

        The only method that another thread may call while `score` runs, because reading takes long. The exchange it
        returns is called between batches; `info` changes with it.
        """

    def sleep(self) -> None:
        """Move the weights off the device."""

    def wake(self) -> None:
        """Bring the weights back."""

    def close(self) -> None:
        """Free everything."""


def require_awake(model: str, *, asleep: bool, closed: bool) -> None:
    """Refuse to compute for an engine that sleeps or is closed.

    Raises:
        UnavailableError: in these cases.
    """
    if closed or asleep:
        state = "closed; load it again" if closed else "asleep; wake it first"
        raise UnavailableError(f"teacher {model} is {state}.")
