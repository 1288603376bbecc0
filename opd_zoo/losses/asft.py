"""ASFT: cross-entropy on given answers in which the tokens of an action have a larger weight (GUI-Libra).

    loss_t = -w_t log pi(y_t),   w_t the weight of the last of `spans` whose pattern holds a part of the token, else 1

Patterns are regular expressions on the text of the response, in which . also matches line ends. The paper weighs
reasoning by 1, the action by 2 and the action's place on the screen by 4: spans [{pattern: "<action>.*?</action>",
weight: 2}, {pattern: "point=[^ ]*", weight: 4}]. The weights do not enter the denominators of the aggregation. The term
learns from given rows (method expert_rows). Source: GUI-Libra, arXiv 2602.22190 (text); how its spans are marked in the
text of an answer is ours.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from opd.config import Settings
from opd_zoo.text_spans import pieces_of
from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Span(Settings):
    """A pattern, and the weight of the tokens that it matches."""

    pattern: str = Field(description="Regular expression; tokens that overlap a match get the weight.")
    weight: float = Field(ge=0, description="Weight of those tokens.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        return pattern


class AsftSettings(TermSettings):
    """Settings of ASFT."""

    rows: Literal["all", "sampled", "expert"] = "expert"
    spans: list[Span] = Field(
        default_factory=lambda: [Span(pattern="<action>.*?</action>", weight=2.0)],
        min_length=1,
        description="Weighted spans. Where several of them overlap a token, the last one counts.",
    )


class Asft(Term[AsftSettings]):
    """Cross-entropy on given tokens, with more weight on actions (GUI-Libra's ASFT)."""

    evidence: ClassVar[str] = "text"

    def __init__(self, settings: AsftSettings) -> None:
        super().__init__(settings)
        self._tokenizer: Any = None

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens."""
        return Needs(student=frozenset({SCORES}))

    def bind(self, tokenizer: Any) -> None:
        """Keep the tokenizer, which gives the text of each token."""
        self._tokenizer = tokenizer

    def weights(self, pieces: Sequence[str]) -> NDArray[np.float32]:
        """[T] float32 weight of each token of a response, from the texts of its tokens."""
        ends = np.cumsum([len(piece) for piece in pieces])
        starts, text = ends - [len(piece) for piece in pieces], "".join(pieces)
        found = np.ones(len(pieces), np.float32)
        for span in self.settings.spans:
            for match in re.finditer(span.pattern, text, re.DOTALL):
                found[(ends > match.start()) & (starts < match.end())] = span.weight
        return found

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics sft_nats and weighted_share (tokens with a weight other than 1)."""
        import torch

        live = have(batch.student.scores, "scores").sampled
        # A run binds the tokenizer before the first step; without one there is no text to match, and weights are 1.
        known = self._tokenizer is not None
        found = [self.weights(pieces_of(r.response_ids, self._tokenizer)) if known else 1.0 for r in batch.rows]
        weight = batch.of_tokens(found)
        zero, count = torch.zeros_like(live.detach()), batch.mask.sum()
        return TermOutput(
            -weight.to(live.dtype) * live,
            metrics={
                "sft_nats": (torch.where(batch.mask, -live.detach(), zero).sum(), count),
                "weighted_share": ((batch.mask & (weight != 1.0)).sum(), count),
            },
        )
