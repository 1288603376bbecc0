"""What must be true of the prompts before a run begins."""

from collections.abc import Sequence

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from student.recipe import Recipe
from student.scoring.needs import Needs

_JUDGED_PROMPTS = 256


def check_prompts(recipe: Recipe, needs: Needs, source: PromptSource) -> None:
    """Draw training and held-out prompts, and for rewards see that answers can be judged.

    Raises:
        DataError: when there are too few, or none of the first prompts has an answer to judge by.
    """
    prompts = source.prompts("train", min(recipe.rollout.prompts_per_step, _JUDGED_PROMPTS))
    source.prompts("heldout", recipe.eval.prompts)
    if needs.reward and not can_judge(prompts, source):
        raise DataError(
            f"the objective needs rewards, but none of the first {len(prompts)} prompts has an answer to judge by; "
            "give prompts answers (prompts.answer_column), or use an objective that needs none."
        )


def can_judge(prompts: Sequence[Prompt], source: PromptSource) -> bool:
    """Whether the verifier comes to a verdict on an answer to any of `prompts`."""
    return any(prompt.answer is not None for prompt in prompts) or any(
        source.verify(prompt, "").known for prompt in prompts
    )
