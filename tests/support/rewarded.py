"""Rows to be rewarded, without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import rows

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind, Scores
from student.data.row import Row

Make = Callable[..., Row]


@pytest.fixture
def make_row() -> Make:
    def make(
        text: str = "",
        value: float | None = None,
        *,
        sample: int = 0,
        length: int = 4,
        step: int = 0,
        prompt: Prompt | None = None,
        truncated: bool = False,
    ) -> Row:
        prompt = prompt or Prompt.make("q", answer="42")
        return rows.make_row(
            np.arange(length),
            prompt=prompt,
            prompt_ids=np.arange(3, dtype=np.uint32),
            step=step,
            sample=sample,
            truncated=truncated,
            text=text,
            turns=((0, length),),
            verdict=Verdict.unknown("not asked") if value is None else Verdict.score(value),
        )

    return make


class Bytes:
    """A token for every byte."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return bytes(ids).decode()


class Services:
    """What rewards ask: bytes as tokens, the text as the answer, and log-probs that a test sets.

    `log_probs` gives those of a response from the ids before it and its own.
    """

    def __init__(self) -> None:
        self.log_probs: Callable[[list[int], list[int]], Sequence[float]] = lambda before, ids: [0.0] * len(ids)
        self.read_items: list[Any] = []

    tokenizer = Bytes()

    def read(self, items: Sequence[Any], spec: Any = None, **options: Any) -> list[Scores]:
        self.read_items += items
        found = [
            np.array(self.log_probs(i.token_ids[: i.prompt_length].tolist(), i.response_ids.tolist()), np.float32)
            for i in items
        ]
        if spec is None or spec.kind is not PayloadKind.TOPK:
            return [Scores(sampled=values) for values in found]
        # The response token is the only likely one: the rest is the tail.
        tails = [np.log1p(-np.minimum(np.exp(values), 1 - 1e-7)) for values in found]
        return [Scores(sampled=v, values=v[:, None], log_tail=t) for v, t in zip(found, tails, strict=True)]

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        return [row.text or None for row in rows]


@pytest.fixture
def services() -> Services:
    return Services()
