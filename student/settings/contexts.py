"""What models read before a response, `contexts` in a recipe."""

from typing import Any, Literal

from pydantic import Field, model_validator

from opd.config import Settings


class ContextTurn(Settings):
    """A message of an example conversation."""

    role: Literal["user", "assistant"] = Field(description="Who says it.")
    content: str = Field(description="Template of what is said.")


class ContextSettings(Settings):
    """What a model reads before the response, in place of the student's prompt.

    All texts are Jinja templates over `prompt` (the prompt's text, or the last user message), `answer`, `domain` and
    the further columns of the prompt (`keep_columns` of a table), and over `row` and `group`: the outcomes of the
    row and of the other answers to its prompt (docs/methods.md).
    """

    system: str | None = Field(
        None, description="System message for chat prompts, as a template; it replaces an existing one."
    )
    prompt: str | None = Field(None, description="Template of the text prompt, or of the last user message of a chat.")
    turns: list[ContextTurn] = Field(
        default_factory=list,
        description="Example turns (few-shot) that a chat begins with, after its system message, each with role and "
        "content.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum length of a context in tokens. A longer one is an error, except that one made from "
        "outcomes is ignored (see skip_without). null means rollout.max_prompt_tokens.",
    )
    success: float = Field(1.0, description="Minimum reward of an answer that may be used as group.best.")
    skip_without: list[Literal["row.feedback", "group.best", "group.worst"]] = Field(
        default_factory=list,
        description="Skip rows for which all of these are empty: the terms that learn from this model then ignore "
        "them (SDPO: [group.best, row.feedback]). The metric context_missing_share is their share.",
    )
    template_options: dict[str, Any] | None = Field(
        None, description="Options passed to the chat template; null means the options of the prompt."
    )

    @property
    def texts(self) -> tuple[str, ...]:
        """All templates that are set."""
        return tuple(text for text in (self.system, *(turn.content for turn in self.turns), self.prompt) if text)

    @model_validator(mode="after")
    def _check(self) -> "ContextSettings":
        if not self.texts:
            raise ValueError("a context needs a text; set system, prompt or turns")
        said = "".join(self.texts)
        unread = [name for name in self.skip_without if name not in said]
        if unread:
            raise ValueError(f"skip_without names {unread[0]}, which no text of the context reads; remove it")
        return self
