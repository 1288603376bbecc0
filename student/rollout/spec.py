"""What every rollout of a run shares."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What every rollout of a run shares.

    Attributes:
        seed: the run's seed; with a row's key it names the row's random stream.
        batch_rows: rows decoded together.
        candidates: K most likely ids to keep per position, 0 for none.
        valid_vocab: ids the tokenizer can produce.
        max_prompt_tokens: longer prompts are an error.
    """

    seed: int
    batch_rows: int
    candidates: int
    valid_vocab: int
    max_prompt_tokens: int
