"""What must be true of the prompts before a run begins."""

from opd.errors import DataError
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
    if not needs.reward or any(prompt.answer is not None for prompt in prompts):
        return
    if not any(source.verify(prompt, "").known for prompt in prompts):
        raise DataError(
            f"the objective needs rewards, but none of the first {len(prompts)} prompts has an answer to judge by; "
            "give prompts answers (prompts.answer_column), or use an objective that needs none."
        )
