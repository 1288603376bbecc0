"""How episodes are played, `rollout.episodes` in a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from opd.config import Settings
from opd.tasks.environments.pool import PoolSettings

_INSTRUCTION = (
    "Your context is nearly full. Summarise the episode so far: what is to be done, what was found out, and what comes "
    "next. You will go on from the first message and your summary alone."
)


class SummarySettings(Settings):
    """Summaries of an episode by the student, with `history: summary`."""

    context_tokens: int = Field(
        8192,
        ge=1,
        description="Maximum length in tokens of what the model reads at once: the prompt, what it sees of the "
        "episode, and the turn it writes.",
    )
    tokens: int = Field(
        512,
        ge=1,
        description="Maximum length of a summary in tokens. A longer one is truncated and counted in the metrics.",
    )
    most: int = Field(
        8,
        ge=1,
        description="Maximum number of summaries in an episode. An episode that needs more ends as `context`.",
    )
    instruction: str = Field(
        _INSTRUCTION, min_length=1, description="Text that asks for a summary, in place of the next observation."
    )


Turns = Annotated[int, Field(ge=1)]


class EpisodeSettings(Settings):
    """How prompts that name an environment are played."""

    turns: int = Field(30, ge=1, description="Maximum number of turns that the student takes in an episode.")
    turn_tokens: int = Field(
        256, ge=1, description="Maximum tokens of one turn; rollout.max_new_tokens limits the whole episode."
    )
    history: Turns | Literal["summary"] | None = Field(
        None,
        description="What the student and its teachers see of an episode after the prompt and the first observation. "
        "A number: that many earlier turns, each with the observation that followed. summary: the student's own "
        "summary. null: everything.",
    )
    summary: SummarySettings = Field(
        default_factory=SummarySettings, description="When and how episodes are summarised, with `history: summary`."
    )
    isolation: Literal["process", "none"] = Field(
        "process",
        description="process: every episode runs in its own process, with time limits. none: it runs in the student's "
        "process, for environments that neither hang nor crash it. In both cases an exception costs only its own "
        "episode.",
    )
    limits: PoolSettings = Field(
        default_factory=PoolSettings, description="Limits on episodes; time and memory need `isolation: process`."
    )

    @field_validator("history", mode="wrap")
    @classmethod
    def _check_history(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:  # its message has a sentence for each type that is allowed
            raise ValueError("set a number of turns (1 or more), summary, or null for everything") from None

    @model_validator(mode="after")
    def _check_summary(self) -> EpisodeSettings:
        if self.history != "summary" and self.summary != SummarySettings():
            raise ValueError(
                f"summary is set, but history is {self.history}, so nothing is summarised; set history to summary"
            )
        return self

    @property
    def summarised(self) -> int | None:
        """Maximum tokens of a sequence, prompt included, if episodes are summarised; otherwise None."""
        return self.summary.context_tokens if self.history == "summary" else None
