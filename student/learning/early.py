"""Learning while teachers still score: the gradient of a step begins before all of its scores are there.

    sampler    rollout |
    teachers      scoring ..................... |
    learner            | micro-batch | micro-batch | micro-batch | optimizer

The loss of a micro-batch needs the scores of its own rows alone. So where nothing else in the recipe reads the scores
of a step before its update, the loop waits for each micro-batch by itself. Micro-batches and their order are those of a
loop that waits for all in the same order, and so are the weights, bit for bit: the shortest rows first, because they
are sampled and scored first. Until the optimizer's step nothing has moved: a teacher that stays away and Ctrl-C find
the step as it was before it.

`train.micro_batch_tokens` decides how finely the two are interleaved; with one micro-batch there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from student.controllers import Controller
from student.learning.terms import Term
from student.scoring.contexts import reads_outcomes

if TYPE_CHECKING:
    from student.plugins import Plugins
    from student.recipe import Recipe

Hook = TypeVar("Hook", bound=Callable[..., Any])
_OF_TERMS = ("admits", "assess", "hooks", "prepare", "selects", "sequence", "strata", "stratum", "within")
_OF_METHODS = ("compose", "hooks", "updates")


def reads_no_scores(hook: Hook) -> Hook:
    """Mark a hook of a term, a method, a strategy or a reward that looks at no scores: they may come after its call.

    A function that overrides it is not marked. A marked hook that gives rows gives those that it was given.
    """
    hook.reads_no_scores = True  # type: ignore[attr-defined]
    return hook


def learns_early(recipe: Recipe, plugins: Plugins) -> bool:
    """Whether the update of a step may begin before all of its scores are there."""
    train = recipe.train
    if train.epochs > 1 or train.minibatches > 1:
        return False
    # Contexts of outcomes are asked about once rows are judged.
    if any(reads_outcomes(role, context) for role, context in recipe.contexts.items()):
        return False
    hooks = [(getattr(type(term), name), getattr(Term, name)) for term in plugins.terms for name in _OF_TERMS]
    for method in plugins.controllers:
        hooks += [(getattr(type(method), name), getattr(Controller, name)) for name in _OF_METHODS]
    hooks += [(type(reward).reward, None) for reward in plugins.rewards.parts]
    hooks.append((type(plugins.strategy).run, None))
    return all(hook is base or getattr(hook, "reads_no_scores", False) for hook, base in hooks)
