"""Whether rows come from the policy that learns from them, as far as the plug-ins that a recipe names can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from student.plugin.controllers import CONTROLLERS
from student.plugin.strategy import STRATEGIES
from student.rollout.engine import ROLLOUT_ENGINES

if TYPE_CHECKING:
    from student.settings.recipe import Recipe


def samples_as_it_scores(recipe: Recipe) -> bool:
    """Whether the student samples with the weights and the numerics under which its rows are scored."""
    engine = ROLLOUT_ENGINES.load(str(recipe.rollout.engine["name"]))
    return not engine.holds_weights and not recipe.train.max_staleness


def gives_rows(recipe: Recipe, *, with_log_probs: bool = False) -> bool:
    """Whether a strategy or method gives rows that the student did not sample under the prompt that they train.

    Args:
        recipe: the recipe.
        with_log_probs: count only rows with log-probs under a policy, as those of every strategy have.
    """
    methods = [CONTROLLERS.load(str(entry["name"])) for entry in recipe.methods]
    given = any(method.gives_log_probs if with_log_probs else method.gives_answers for method in methods)
    return given or bool(STRATEGIES.load(str(recipe.rollout.strategy["name"])).gives_rows)
