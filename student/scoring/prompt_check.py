"""Checks of the prompts before a run begins."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opd.errors import DataError
from opd.tasks.encode import encode_prompt
from opd.tasks.environments.base import ENVIRONMENT
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from student.plugins import Plugins
from student.recipe import Recipe
from student.scoring.contexts import Contexts

_JUDGED_PROMPTS = 256


def check_prompts(recipe: Recipe, plugins: Plugins, source: PromptSource) -> None:
    """Draw training and held-out prompts, let plug-ins look at them, and for rewards see that answers can be judged.

    Raises:
        DataError: when there are too few, they lack what a plug-in reads, or none of the first prompts has an answer
            to judge by.
    """
    prompts = source.prompts("train", min(recipe.rollout.prompts_per_step, _JUDGED_PROMPTS))
    source.prompts("heldout", recipe.eval.prompts)
    for controller in plugins.controllers:
        controller.check_prompts(prompts)
    plugins.strategy.check_prompts(prompts)
    plugins.rewards.check_prompts(prompts)
    if plugins.needs.reward == "verdict" and not can_judge(prompts, source):
        raise DataError(
            f"the objective needs rewards, but none of the first {len(prompts)} prompts has an answer to judge by; "
            "give prompts answers (prompts.answer_column), or use an objective that needs none."
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
                f"contexts.{role} is the student's own prompt for each of the first {len(prompts)} prompts, so that it "
                "would change nothing; correct its template."
            )
