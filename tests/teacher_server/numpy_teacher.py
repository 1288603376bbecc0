"""A small exact teacher in numpy: the service's tests run it in this process and in server processes."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from opd.wire.fingerprint import head_hash
from opd.wire.spans import cut, whole
from opd.wire.tensors import bf16_bits
from opd.wire.types import Head, PayloadKind, Scores
from teacher_server.engines.base import EngineInfo, EngineItem, Exchange, HeadIdentity, TokenizerIdentity


class NumpyEngine:
    """A bigram softmax teacher: the next token depends on the present one; exact, deterministic, quick.

    `seconds_per_batch` and the `before_score` hook let tests slow it down or break it; in a process of its own, a batch
    waits while there is a file `hold`, and a load while there is a file `hold_load`. A batch loses `leak` bytes.
    """

    VOCAB = 97
    DOCUMENT = b""
    """What GetTokenizer sends."""

    def __init__(
        self,
        model: str = "numpy",
        *,
        vocab: int = VOCAB,
        hidden: int = 8,
        seed: int = 0,
        seconds: float = 0.0,
        hold: str = "",
        hold_load: str = "",
        leak: int = 0,
    ) -> None:
        _wait_while(hold_load)
        self.model = model
        self.vocab, self.hidden = vocab, hidden
        self.seconds_per_batch = seconds
        self.hold = hold
        self.before_score: Callable[[Sequence[EngineItem]], None] = lambda batch: None
        self.batches: list[int] = []
        self.asleep = self.closed = False
        self.spans = True
        self.threads: set[int] = set()
        self.bytes = 0
        self._leak, self._leaked = leak, []
        self.before_prepare: Callable[[Path], None] = lambda folder: None
        self._weights(seed)

    def _weights(self, seed: int, spoiled: bool = False) -> None:
        self.weights = (seed, spoiled)
        rng = np.random.default_rng(seed)
        self._embed = rng.normal(size=(self.vocab, self.hidden)).astype(np.float32)
        if spoiled:
            self._embed[3] = np.nan
        self._head = rng.normal(size=(self.vocab, self.hidden)).astype(np.float32)
        made = Head(self._head, None, "f32", 1.0, 0.0, "")
        self._head_identity = HeadIdentity(head_hash(made), self.hidden, 1.0, 0.0, "f32", has_bias=False)
        self._hash = hashlib.sha256(self._embed.tobytes() + self._head.tobytes()).hexdigest()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="numpy 1",
            model=self.model,
            weights_hash=self._hash,
            compute_dtype="f32",
            vocab_size=self.vocab,
            tokenizer=TokenizerIdentity(
                "f" * 64,
                "",
                self.vocab,
                tokens=[b"t%d" % i for i in range(self.vocab)],
                document=self.DOCUMENT,
            ),
            head=self._head_identity,
            payloads=frozenset(PayloadKind),
            supports_temperature=True,
            max_sequence_tokens=100_000,
            max_k=self.vocab,
            deterministic=True,
            padding_rows=31,
            stop_token_ids=(5, 9),
            spans=self.spans,
        )

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        assert not self.asleep and not self.closed
        self.threads.add(threading.get_ident())
        self.batches.append(len(batch))
        self.before_score(batch)
        _wait_while(self.hold)
        if self._leak:
            self._leaked.append(bytearray(b"x") * self._leak)
        if self.seconds_per_batch:
            time.sleep(self.seconds_per_batch)
        return [None if entry.cancelled() else cut(self._one(entry), entry.item) for entry in batch]

    def _one(self, entry: EngineItem) -> Scores:
        item, spec = whole(entry.item), entry.spec
        hidden = self._embed[item.token_ids[item.prompt_length - 1 : -1]]
        if spec.kind is PayloadKind.HIDDEN:
            return Scores(hidden=hidden if spec.value_dtype == "f32" else bf16_bits(hidden))
        logits = hidden @ self._head.T / np.float32(entry.temperature)
        if spec.kind is PayloadKind.FULL:
            return Scores(logits=logits)
        top = logits.max(axis=1, keepdims=True)
        log_probs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        rows = np.arange(len(hidden))
        sampled = log_probs[rows, item.response_ids]
        ranks = (log_probs > sampled[:, None]).sum(1).astype(np.uint32) + 1 if entry.ranks else None
        if spec.kind is PayloadKind.SAMPLED:
            return Scores(sampled=sampled, ranks=ranks)
        ids = item.gather_ids
        if ids is None:
            ids = np.argsort(-log_probs, axis=1, kind="stable")[:, : spec.k].astype(np.uint32)
        values = np.take_along_axis(log_probs, ids.astype(np.int64), axis=1)
        rest = np.exp(log_probs.astype(np.float64))
        np.put_along_axis(rest, ids.astype(np.int64), 0.0, axis=1)
        with np.errstate(divide="ignore"):
            log_tail = np.log(rest.sum(axis=1)).astype(np.float32)
        return Scores(sampled=sampled, values=values, ids=ids, log_tail=log_tail, ranks=ranks)

    def head(self) -> Head:
        return Head(self._head, None, "f32", 1.0, 0.0, self._head_identity.hash)

    def memory_bytes(self) -> int:
        return self.bytes

    def prepare_weights(self, folder: Path) -> Exchange:
        """The file `seed` holds the seed, and "nan" behind it for weights with a NaN in them."""
        self.before_prepare(folder)
        seed, *spoiled = (folder / "seed").read_text().split()
        other = (int(seed), bool(spoiled))

        def exchange() -> None:
            nonlocal other
            mine, other = other, self.weights
            self._weights(*mine)

        return exchange

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        self.closed = True


def _wait_while(file: str) -> None:
    while file and Path(file).exists():
        time.sleep(0.01)
