"""How the student samples, `rollout` in a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opd.config import Settings
from student.settings.episodes import EpisodeSettings


class RolloutSettings(Settings):
    """How the student samples responses."""

    prompts_per_step: int = Field(64, ge=1, description="Number of prompts in a step, over all ranks.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses to each prompt, which form its group.")
    max_new_tokens: int = Field(512, ge=1, description="Maximum length of a response in tokens.")
    max_prompt_tokens: int = Field(2048, ge=1, description="Maximum length of a prompt in tokens.")
    long_prompts: Literal["drop", "error"] = Field(
        "error",
        description="What happens to prompts over max_prompt_tokens, in training and held out: error refuses the run, "
        "drop leaves them out. Rows of files and datasets are measured before the run begins, generated prompts when "
        "they are drawn.",
    )
    stop_tokens: list[int | str] = Field(
        default_factory=list,
        description="Tokens, by text or id, that end a response in addition to those of the tokenizer and of the "
        "model's generation_config.",
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Texts that end a response where they appear, also across tokens. The token that completes one is "
        "the last of the response; the text that is judged ends before it. Only engine transformers stops there: the "
        "others sample on, and what follows is dropped.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature, at which the loss is computed too.")
    batch_rows: int = Field(
        64,
        ge=1,
        description="Maximum number of responses decoded together. When a response ends, the next one takes its place.",
    )
    cache_tokens: int = Field(
        262_144,
        ge=1,
        description="Maximum number of tokens whose keys and values are held at once, counted as the number of "
        "responses decoded together times the longest possible prompt and response. If it would be exceeded, fewer "
        "responses are decoded together, but never fewer than four.",
    )
    verify_workers: int = Field(
        4,
        ge=1,
        le=256,
        description="Number of answers that are verified in parallel, in separate processes if the verifier supports "
        "that.",
    )
    strategy: dict[str, Any] = Field(
        default_factory=lambda: {"name": "single"},
        description="Rollout strategy, which turns the plan of a step into rows, with its settings; see "
        "`opd plugins list rollout_strategy`.",
    )
    engine: dict[str, Any] = Field(
        default_factory=lambda: {"name": "transformers"},
        description="Rollout engine, which samples the responses, with its settings; see "
        "`opd plugins list rollout_engine`.",
    )
    episodes: EpisodeSettings = Field(
        default_factory=EpisodeSettings, description="How episodes of prompts that name an environment are played."
    )

    @model_validator(mode="after")
    def _check_summaries(self) -> "RolloutSettings":
        summary, turn, prompt = self.episodes.summary, self.episodes.turn_tokens, self.max_prompt_tokens
        least = prompt + turn + 2 * summary.tokens
        if self.episodes.summarised is not None and summary.context_tokens < least:
            raise ValueError(
                f"episodes.summary.context_tokens ({summary.context_tokens}) is below {least}, the room that the "
                f"longest prompt (max_prompt_tokens {prompt}), a summary (tokens {summary.tokens}), a turn "
                f"(turn_tokens {turn}) and the next summary may take; raise it, or lower those"
            )
        return self

    def longest_sequence(self, prompt: int) -> int:
        """The most tokens of prompt and response in one forward pass, for prompts of up to `prompt` tokens."""
        limit = self.episodes.summarised
        response = self.max_new_tokens if limit is None else min(self.max_new_tokens, limit)
        longest = prompt + response
        return longest if limit is None or prompt > self.max_prompt_tokens else min(longest, limit)
