"""Settings that every rollout of a run shares, as plain values."""

from dataclasses import dataclass
from typing import Any

import torch

LEAST_ROWS = 5
"""Matrix products of fewer rows round differently; see `student.rollout.slots`."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Settings that every rollout of a run shares.

    Attributes:
        seed: the run's seed; with a row's key it determines the row's random stream.
        batch_rows: maximum number of rows decoded together.
        candidates: K, the number of most likely ids to keep per position; 0 for none.
        valid_vocab: number of ids that the tokenizer can produce.
        max_prompt_tokens: longer prompts are an error.
        stop_ids: ids that end a response; empty for the tokenizer's end of sequence alone.
        keep_ids: ids that are always among the candidates, fewer than `candidates`.
        cache_tokens: bound on the tokens whose keys and values are held at once, counted as rows times the maximum
            length of a row; five rows always run.
        autocast: dtype of matrix products and of keys and values; None for the dtype of the weights.
        read_given: whether the student reads given answers for their log-probs and candidates; otherwise their
            log-probs are NaN.
        moe_routes: record the experts that each token is routed to (`Row.moe_routes`), in rollouts for training.
    """

    seed: int
    batch_rows: int
    candidates: int
    valid_vocab: int
    max_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()
    keep_ids: tuple[int, ...] = ()
    cache_tokens: int = 262_144
    autocast: torch.dtype | None = None
    read_given: bool = True
    moe_routes: bool = False

    def rows(self, longest: int) -> int:
        """The number of rows to decode together if each may become `longest` tokens long."""
        return min(self.batch_rows, max(LEAST_ROWS, self.cache_tokens // max(1, longest)))

    def stops(self, tokenizer: Any) -> frozenset[int]:
        """Ids that end a response; without any, every response runs to its length limit."""
        if self.stop_ids:  # checked first, because asking a tokenizer is slow and every row asks
            return self.stop_ids
        eos = tokenizer.eos_token_id
        return frozenset(() if eos is None else (int(eos),))
