"""What several systems do with prompts: rewrite them by a template, and check what the recipe keeps of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opd.tasks.prompt import Prompt
    from student.settings.recipe import Recipe


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with each {name} of `values` replaced. A {name} inside a value stays as it is: values may be answers."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def in_template(prompt: Prompt, text: str, values: Mapping[str, str] | None = None) -> Prompt:
    """The prompt with `text` in place of its text, or of the last user message of a chat.

    Args:
        prompt: the prompt; {prompt} in `text` stands for what is replaced.
        text: the template.
        values: what further names in the template stand for.
    """
    values = values or {}
    if prompt.messages is None:
        return replace(prompt, text=filled(text, {**values, "prompt": prompt.text or ""}))
    messages = [dict(message) for message in prompt.messages]
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    messages[last]["content"] = filled(text, {**values, "prompt": messages[last]["content"]})
    return replace(prompt, messages=tuple(messages))


def sources(recipe: Recipe) -> list[Any]:
    """The sources of prompts; a mixture is listed source by source."""
    return list(getattr(recipe.prompts, "mix", None) or [recipe.prompts])


def check_kept(recipe: Recipe, column: str, who: str) -> None:
    """Refuse a column that no source of prompts keeps; columns of procedural tasks are not known in advance.

    Args:
        recipe: the recipe.
        column: the column.
        who: what reads the column, for the message.

    Raises:
        ConfigError: naming the setting that keeps it.
    """
    if not any(hasattr(one, "task") or column in one.keep_columns for one in sources(recipe)):
        raise ConfigError(
            f"{who} reads column {column!r}, which is not kept with the prompts, so it would do nothing; add it to "
            "prompts.keep_columns."
        )


def never_again(recipe: Recipe) -> bool:
    """Whether all prompts come from procedural tasks, which hardly ever repeat a prompt."""
    return all(hasattr(one, "task") for one in sources(recipe))
