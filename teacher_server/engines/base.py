"""The protocol between the server and whatever runs the teacher model, and the last check before a model.

An engine computes scores and depends on neither gRPC nor queues nor clients. It is called from one worker thread, with
a batch that the queue put together within a token budget. What an engine cannot do exactly is left out of its
`EngineInfo`, so it is refused before it reaches the engine, and never approximated silently.

The service validates requests when it parses them. Engines repeat the checks (`check_batch`) because an id out of range
destroys the CUDA context, not only the request, and because engines are also used without the service.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from opd.errors import InvalidRequestError, UnavailableError
from opd.wire.spans import check_spans
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What identifies a tokenizer; see `opd.wire.fingerprint`.

    Attributes:
        fingerprint: SHA-256 of the map from id to bytes, in hex.
        chat_template_hash: SHA-256 of the chat template, in hex; "" if there is none.
        size: number of ids that the tokenizer can produce.
        eos_id, bos_id, pad_id: special ids; -1 for those that do not exist.
        tokens: bytes of each id's text.
        document: what GetTokenizer sends of it (`opd.wire.tokenizer`); empty if it cannot be sent.
    """

    fingerprint: str
    chat_template_hash: str
    size: int
    eos_id: int = -1
    bos_id: int = -1
    pad_id: int = -1
    tokens: Sequence[bytes] = field(default=(), repr=False)
    document: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """An output head without its weights: their shape, what is done to the logits, and a hash of the contents."""

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
        model: path or hub id from which the weights came.
        weights_hash: hash of the weights in use, in hex.
        compute_dtype: "f32", "bf16" or "f16".
        vocab_size: V, the number of ids that count: log-probs are normalised over them, and every token id is below;
            see `teacher_server.engines.loading.counted_ids`.
        tokenizer: identity of the tokenizer.
        head: identity of the head; None if hidden states are not served.
        payloads: kinds of payload that are served exactly.
        supports_temperature: whether temperatures other than 1 are applied.
        max_sequence_tokens: most tokens in a sequence, prompt and response together.
        max_k: largest k of topk and gather.
        deterministic: whether a row's scores are bit-equal whatever it is batched with.
        padding_rows: rows of the model's head beyond V, cut off before log-probs are normalised or a top k is taken.
        stop_token_ids: ids that end a response, ascending; see `teacher_server.engines.loading.load_stop_token_ids`.
        spans: whether items with spans are scored, at their positions only. If not, the engine gets no such items.
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
    """One sequence of an engine's batch.

    Attributes:
        item: ids, prompt length, spans and, for gather, the ids to gather; validated.
        spec: the payload, which may differ between the items of a batch.
        temperature: divides the logits; not applied to hidden states.
        cancelled: polled between forward passes; a cancelled item may be skipped, and its result is then None.
        ranks: whether `Scores.ranks` is wanted, with payload sampled or topk; engines without logits leave it out.
    """

    item: ScoreItem
    spec: PayloadSpec
    temperature: float = 1.0
    cancelled: Callable[[], bool] = field(default=_never)
    ranks: bool = False


Exchange = Callable[[], None]
"""Swaps prepared weights with those in use, all or nothing; a second call swaps them back."""


class Engine(Protocol):
    """Runs one teacher model."""

    @property
    def info(self) -> EngineInfo:
        """Identity and abilities; changes when weights are replaced."""

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Score a batch: one result per item, in order; None for an item that was cancelled.

        Raises:
            NonFiniteError: if the model produced NaN or infinity for an item.
        """

    def head(self) -> Head:
        """The output head, for clients that take hidden states."""

    def memory_bytes(self) -> int:
        """Bytes that the weights take where they compute; 0 if the engine cannot tell."""

    def prepare_weights(self, folder: Path) -> Exchange:
        """Read and check weights of the same architecture from a safetensors folder; those in use stay.

        This is the only method that another thread may call while `score` runs, because reading takes long. The
        exchange that it returns is called between batches and changes `info`.
        """

    def sleep(self) -> None:
        """Move the weights off the device."""

    def wake(self) -> None:
        """Move the weights back to the device."""

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


def check_batch(info: EngineInfo, batch: Sequence[EngineItem]) -> None:
    """Refuse items that this engine cannot score exactly.

    Raises:
        InvalidRequestError: naming the item's index, the value and the limit.
    """
    for index, entry in enumerate(batch):
        _check_payload(info, entry, index)
        _check_ids(info, entry, index)


def _check_payload(info: EngineInfo, entry: EngineItem, index: int) -> None:
    spec = entry.spec
    if spec.kind not in info.payloads:
        served = ", ".join(sorted(info.payloads))
        raise InvalidRequestError(f"sequence {index}: {info.engine} does not serve payload {spec.kind}; use {served}.")
    if spec.k > info.max_k:
        raise InvalidRequestError(
            f"sequence {index}: k is {spec.k}, but teacher {info.model} serves at most {info.max_k}; ask for fewer ids."
        )
    if not entry.temperature > 0:
        raise InvalidRequestError(f"sequence {index}: temperature is {entry.temperature}, but it must be above 0.")
    if entry.temperature != 1.0 and not info.supports_temperature and spec.kind is not PayloadKind.HIDDEN:
        raise InvalidRequestError(
            f"sequence {index}: {info.engine} scores at temperature 1 only, not {entry.temperature}; use temperature 1 "
            "or another engine."
        )


def _check_ids(info: EngineInfo, entry: EngineItem, index: int) -> None:
    item = entry.item
    length, prompt = len(item.token_ids), item.prompt_length
    if not 1 <= prompt < length:
        raise InvalidRequestError(
            f"sequence {index}: prompt_length is {prompt} of {length} tokens, but prompt and response need at least "
            "one token each."
        )
    if length > info.max_sequence_tokens:
        raise InvalidRequestError(
            f"sequence {index} has {length} tokens, but teacher {info.model} takes at most {info.max_sequence_tokens}; "
            "shorten it."
        )
    # Lengths before ids, and ids before spans: each check relies on the ones before it.
    for name, ids in (("token_ids", item.token_ids), ("gather_ids", item.gather_ids)):
        if ids is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
            raise InvalidRequestError(
                f"sequence {index}: {name} range from {ids.min()} to {ids.max()}, but teacher {info.model} has the ids "
                f"0 to {info.vocab_size - 1}."
            )
    if item.spans and not info.spans:
        raise InvalidRequestError(f"sequence {index}: {info.engine} scores whole responses only; leave the spans out.")
    check_spans(index, item)
    if entry.spec.kind is PayloadKind.GATHER:
        shape = None if item.gather_ids is None else item.gather_ids.shape
        if shape != (item.scored_length, entry.spec.k):
            raise InvalidRequestError(
                f"sequence {index}: gather_ids have shape {shape}, but payload gather with k {entry.spec.k} needs "
                f"({item.scored_length}, {entry.spec.k})."
            )
