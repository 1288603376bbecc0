"""What several systems do with prompts: rewrite them by a template."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from opd.errors import ConfigError
from opd.tasks.environments.base import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt


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


def refuse_episodes(prompts: Sequence[Prompt], what: str) -> None:
    """Refuse prompts that are played, for a plug-in that works on single answers.

    Raises:
        ConfigError: naming the plug-in and the first such prompt.
    """
    for prompt in prompts:
        if ENVIRONMENT in prompt.extra:
            raise ConfigError(
                f"{what} works on single answers, but {prompt.name} is played in an environment; remove one of the two."
            )
