"""What every rollout of a run shares."""

from dataclasses import dataclass
from typing import Any

import torch

LEAST_ROWS = 5
"""Products of fewer rows give a row other bits; see `student.rollout.slots`."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What every rollout of a run shares.

    Attributes:
        seed: the run's seed; with a row's key it names the row's random stream.
        batch_rows: rows decoded together.
        candidates: K most likely ids to keep per position, 0 for none.
        valid_vocab: ids the tokenizer can produce.
        max_prompt_tokens: longer prompts are an error.
        stop_ids: ids that end a response; empty for the tokenizer's end of sequence alone.
        keep_ids: ids that are always among the candidates, fewer than `candidates`.
        cache_tokens: bound on the tokens whose keys and values are held at once: rows times the longest that they may
            become; five rows always run.
        autocast: dtype of the forward's products and of keys and values, or None for that of the weights.
        read_given: have the student read answers that are given, for their log-probs and candidates; without it the
            log-probs are NaN.
        experts: record which experts of a mixture each token passes (`Row.experts`), in rollouts for training.
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
    experts: bool = False

    def rows(self, longest: int) -> int:
        """How many rows that may become `longest` tokens long are decoded together."""
        return min(self.batch_rows, max(LEAST_ROWS, self.cache_tokens // max(1, longest)))

    def stops(self, tokenizer: Any) -> frozenset[int]:
        """Ids that end a response; without any, every response runs to its length limit."""
        if self.stop_ids:  # first: a tokenizer takes its time to say its end of sequence, and every row asks
            return self.stop_ids
        eos = tokenizer.eos_token_id
        return frozenset(() if eos is None else (int(eos),))
