"""Answers with prepared numbers, at once or after a fixed time per token, so that only the cost of the service remains.

Used by benchmarks of transport and load, in server processes too: `--engine constant_engine:ConstantEngine` with this
folder on PYTHONPATH.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opd.wire.types import Head, PayloadKind, Scores
from teacher_server.engines.base import EngineInfo, EngineItem, Exchange, HeadIdentity, TokenizerIdentity

VOCAB = 151_936
HIDDEN = 4096


class ConstantEngine:
    """Answers every position with the same distribution.

    Args:
        model: any name.
        seconds_per_token: how long a batch takes, times its tokens.
        fresh: make the arrays of every answer anew and in the dtype asked for, as an engine does that computes them.
        leak: bytes that are lost at each batch, as a negative control.
    """

    def __init__(self, model: str, *, seconds_per_token: float = 0.0, fresh: bool = False, leak: int = 0) -> None:
        self._model = model
        self._pace = seconds_per_token
        self._fresh = fresh
        self._leak = leak
        self._leaked: list[bytearray] = []
        self._made: dict[tuple[int, int], Scores] = {}

    @property
    def info(self) -> EngineInfo:
        """Identity."""
        return EngineInfo(
            engine="constant 1",
            model=self._model,
            weights_hash="c" * 64,
            compute_dtype="f32",
            vocab_size=VOCAB,
            tokenizer=TokenizerIdentity("", "", VOCAB),
            head=HeadIdentity("0" * 64, HIDDEN, 1.0, 0.0, "bf16", has_bias=False),
            payloads=frozenset(PayloadKind) - {PayloadKind.FULL},
            supports_temperature=True,
            max_sequence_tokens=1 << 20,
            max_k=1024,
        )

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Prepared answers."""
        if self._leak:
            self._leaked.append(bytearray(b"x") * self._leak)
        if self._pace:
            time.sleep(self._pace * sum(len(entry.item.token_ids) for entry in batch))
        return [self._answer(entry) for entry in batch]

    def _answer(self, entry: EngineItem) -> Scores:
        rows, k = entry.item.response_length, entry.spec.k
        if self._fresh:
            self._made.clear()
        if entry.spec.kind is PayloadKind.HIDDEN:
            if entry.spec.value_dtype == "f32":
                return Scores(hidden=np.ones((rows, HIDDEN), np.float32))
            if (rows, -1) not in self._made:
                self._made[rows, -1] = Scores(hidden=np.full((rows, HIDDEN), 0x3F80, np.uint16))
            return self._made[rows, -1]
        if (rows, k) not in self._made:
            half = self._fresh and entry.spec.value_dtype == "f16"
            row = np.log(np.full(max(k, 1), 0.5 / max(k, 1), np.float32)).astype(np.float16 if half else np.float32)
            values = np.tile(row, (rows, 1))
            ids = entry.item.gather_ids
            if ids is None:
                ids = np.tile(np.arange(1000, 1000 + max(k, 1), dtype=np.uint32), (rows, 1))
            tail = np.full(rows, np.log(0.5), np.float32)
            self._made[rows, k] = Scores(tail - 20, values, ids, tail)
        return self._made[rows, k]

    def head(self) -> Head:
        """Not offered."""
        raise ValueError("this engine has no head")

    def memory_bytes(self) -> int:
        """It has no weights."""
        return 0

    def prepare_weights(self, folder: Path) -> Exchange:
        """Nothing to do."""
        return lambda: None

    def sleep(self) -> None:
        """Nothing to do."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
