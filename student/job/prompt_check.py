"""Checks of the prompts before a run begins."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opd.errors import ConfigError, DataError
from opd.tasks.encode import encode_prompt
from opd.tasks.environments.base import ENVIRONMENT
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from student.data.outcome import KEYS
from student.job.plugins import Plugins
from student.job.rules import advantages_of
from student.plugin.base import Plugin
from student.scoring.contexts import Contexts
from student.settings.recipe import Recipe

_JUDGED_PROMPTS = 256


def check_prompts(recipe: Recipe, plugins: Plugins, source: PromptSource) -> None:
    """Draw training and held-out prompts, let plug-ins look at them, and for rewards see that answers can be judged.

    Raises:
        DataError: when there are too few, they lack what a plug-in reads, or none of the first prompts has an answer
            to judge by.
        ConfigError: when an advantage groups rows by a tag that they do not have.
    """
    prompts = source.prompts("train", min(recipe.rollout.prompts_per_step, _JUDGED_PROMPTS))
    source.prompts("heldout", recipe.eval.prompts)
    for plugin in _all(plugins):
        plugin.check_prompts(prompts)
    _check_groups(plugins, prompts)
    if plugins.needs.reward == "verdict" and not can_judge(prompts, source):
        raise DataError(
            f"the objective needs rewards, but none of the first {len(prompts)} prompts has a reference answer to "
            "judge by; name their column in prompts.answer_column, or use an objective without rewards."
        )


def _all(plugins: Plugins) -> list[Plugin[Any]]:
    advantages = [advantage for term in plugins.terms for advantage in advantages_of(term)]
    steering = [*plugins.controllers, plugins.strategy]
    return [*plugins.terms, *advantages, *steering, *plugins.rewards.parts, plugins.engine]


def _check_groups(plugins: Plugins, prompts: Sequence[Prompt]) -> None:
    """Refuse an advantage that groups by a tag which rows of some prompt do not have.

    Raises:
        ConfigError: naming the tag, and those that there are.
    """
    advantages = [advantage for term in plugins.terms for advantage in advantages_of(term)]
    parts = {part: set(part.settings.group) - set(KEYS) for part in advantages}
    for prompt in prompts if any(parts.values()) else ():
        tags = {"ended"} if ENVIRONMENT in prompt.extra else set()
        for plugin in _all(plugins):
            tags |= {tag for tag, column in plugin.traits.tags.items() if not column or column in prompt.extra}
        for part, wanted in parts.items():
            for tag in sorted(wanted - tags):
                raise ConfigError(
                    f"advantage {part.settings.name!r} groups by tag {tag!r}, which rows of {prompt.name} do not have; "
                    f"group by some of {', '.join((*KEYS, *sorted(tags)))}, or have the plug-in that sets the tag name "
                    "it (trait tags)."
                )


def can_judge(prompts: Sequence[Prompt], source: PromptSource) -> bool:
    """Whether the verifier comes to a verdict on an answer to any of `prompts`; environments judge their episodes."""
    return any(prompt.answer is not None or ENVIRONMENT in prompt.extra for prompt in prompts) or any(
        source.verify(prompt, "").known for prompt in prompts
    )


def check_contexts(recipe: Recipe, contexts: Contexts, source: PromptSource, tokenizer: Any) -> None:
    """Fill the contexts of the first training prompts.

    Raises:
        DataError: if one cannot be rendered or is too long, or a context never differs from the prompt.
    """
    if not recipe.contexts:
        return
    prompts = source.prompts("train", min(recipe.rollout.prompts_per_step, _JUDGED_PROMPTS))
    plain = [np.array(encode_prompt(prompt, tokenizer), dtype=np.uint32) for prompt in prompts]
    for role in recipe.contexts:
        filled = [contexts.encode(role, prompt) for prompt in prompts]
        if all(np.array_equal(a, b) for a, b in zip(plain, filled, strict=True)):
            raise DataError(
                f"contexts.{role} gives the student's own prompt for each of the first {len(prompts)} prompts, so it "
                "changes nothing; correct its template."
            )
