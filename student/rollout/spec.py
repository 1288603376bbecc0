"""What every rollout of a run shares."""

from dataclasses import dataclass
from typing import Any


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
    """

    seed: int
    batch_rows: int
    candidates: int
    valid_vocab: int
    max_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()
    keep_ids: tuple[int, ...] = ()

    def stops(self, tokenizer: Any) -> frozenset[int]:
        """Ids that end a response; without any, every response runs to its length limit."""
        eos = tokenizer.eos_token_id
        return self.stop_ids or frozenset(() if eos is None else (int(eos),))
