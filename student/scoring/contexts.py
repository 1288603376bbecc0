"""Prompts that the scoring models read instead of the student's: hints, solutions, system prompts of their own.

A context is a template over the columns of a prompt. It changes what a model reads before the response and nothing of
the response, so that signals stay aligned with the student's tokens; its ids never enter the student's input.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from opd.config import Settings
from opd.errors import ConfigError, DataError
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt

if TYPE_CHECKING:
    from jinja2 import Template

    from student.data.row import Row

_CACHED = 4096


class ContextSettings(Settings):
    """What a model reads before the response, in place of the student's prompt.

    Both texts are Jinja templates over `prompt` (the prompt's text, or the last user message), `answer`, `domain` and
    the further columns of the prompt (`keep_columns` of a table).
    """

    system: str | None = Field(
        None, description="System message, for chat prompts; replaces a system message that is there."
    )
    prompt: str | None = Field(None, description="Text of the prompt, or of the last user message of a chat.")
    max_tokens: int | None = Field(
        None, ge=1, description="A longer context is an error; null: rollout.max_prompt_tokens."
    )
    template_options: dict[str, Any] | None = Field(
        None, description="What the chat template is given beside the messages; null: what the prompt gives it."
    )

    @model_validator(mode="after")
    def _check(self) -> "ContextSettings":
        if self.system is None and self.prompt is None:
            raise ValueError("a context needs a text for system, for prompt, or for both")
        return self


class Context:
    """One template.

    Args:
        role: the role or model that reads it, for messages.
        settings: the template.

    Raises:
        ConfigError: for a text that is no valid template.
    """

    def __init__(self, role: str, settings: ContextSettings) -> None:
        self._role = role
        self._system = _template(settings.system, f"contexts.{role}.system")
        self._prompt = _template(settings.prompt, f"contexts.{role}.prompt")
        self._options = settings.template_options

    def render(self, prompt: Prompt) -> Prompt:
        """The prompt that the role reads for `prompt`.

        Raises:
            DataError: when a template names a column that the prompt lacks, or a system message meets a plain text.
        """
        columns = _columns(prompt)
        text = None if self._prompt is None else self._filled(self._prompt, columns, prompt)
        system = None if self._system is None else self._filled(self._system, columns, prompt)
        if prompt.messages is None:
            if system is not None:
                raise DataError(
                    f"contexts.{self._role}.system is a system message, but {prompt.name} is plain text; write "
                    f"it into contexts.{self._role}.prompt."
                )
            return Prompt.make(text or "", place=prompt.place)
        messages = [dict(message) for message in prompt.messages]
        if text is not None:
            messages[_last_user(messages)]["content"] = text
        if system is not None:
            messages = [m for i, m in enumerate(messages) if i or m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": system})
        options = prompt.template_options if self._options is None else self._options
        return Prompt.make(messages, template_options=options, place=prompt.place)

    def _filled(self, template: "Template", columns: Mapping[str, Any], prompt: Prompt) -> str:
        from jinja2 import TemplateError

        try:
            return template.render(columns)
        except TemplateError as error:
            raise DataError(
                f"contexts.{self._role} cannot be filled for {prompt.name}: {error}; its columns are "
                f"{', '.join(sorted(columns))} (tables keep more by keep_columns)."
            ) from error


class Contexts:
    """The contexts of a recipe as token ids.

    Args:
        settings: by role or model.
        tokenizer: the student's, which is the teachers' too.
        limit: longest context in tokens where its settings say nothing.
    """

    def __init__(self, settings: Mapping[str, ContextSettings], tokenizer: Any, limit: int) -> None:
        self._contexts = {role: (Context(role, one), one.max_tokens or limit) for role, one in settings.items()}
        self._tokenizer = tokenizer
        self._encoded: dict[str, NDArray[np.uint32]] = {}  # rows of a group share their prompt

    def __bool__(self) -> bool:
        return bool(self._contexts)

    def fill(self, row: "Row") -> None:
        """Give a row the ids that each role reads instead of its prompt.

        Raises:
            DataError: when a context cannot be rendered or is too long.
        """
        for role in self._contexts:
            row.contexts[role] = self.encode(role, row.prompt)

    def encode(self, role: str, prompt: Prompt) -> NDArray[np.uint32]:
        """[P'] uint32: the context of `role` for `prompt`.

        Raises:
            DataError: when it cannot be rendered or is too long.
        """
        context, limit = self._contexts[role]
        rendered = context.render(prompt)
        ids = self._encoded.get(rendered.uid)
        if ids is None:
            ids = np.array(encode_prompt(rendered, self._tokenizer), dtype=np.uint32)
            ids.setflags(write=False)
            if len(self._encoded) >= _CACHED:
                self._encoded.clear()
            self._encoded[rendered.uid] = ids
        if len(ids) > limit:
            raise DataError(
                f"the context of {role} for {prompt.name} has {len(ids)} tokens, over the limit of {limit}; "
                f"raise contexts.{role}.max_tokens."
            )
        return ids


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What templates may name; a column without a value counts as missing."""
    text = prompt.text
    if prompt.messages is not None:
        text = prompt.messages[_last_user(prompt.messages)]["content"]
    own = {"prompt": text, "answer": prompt.answer, "domain": prompt.domain}
    return {name: value for name, value in {**prompt.extra, **own}.items() if value is not None}


def _last_user(messages: Any) -> int:
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else len(messages) - 1


def _template(text: str | None, where: str) -> "Template | None":
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if text is None:
        return None
    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)
    except TemplateError as error:
        raise ConfigError(f"{where} is not a valid Jinja template: {error}.") from error
