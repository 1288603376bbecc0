"""Learning while teachers still score: the gradient of a step begins before all of its scores have arrived.

    sampler    rollout |
    teachers      scoring ..................... |
    learner            | micro-batch | micro-batch | micro-batch | optimizer

The loss of a micro-batch needs only the scores of its own rows. So unless something else in the recipe reads the scores
of a step before its update, the learner waits for one micro-batch at a time. Micro-batches of the shortest rows come
first, because these are sampled and scored first. The weights are bit-identical to those of a loop that waits for all
scores and takes the micro-batches in the same order. Until the optimizer's step nothing has changed, so a step that is
interrupted, or whose teacher is lost, can be taken again.

`train.micro_batch_tokens` sets how finely scoring and learning interleave; with a single micro-batch nothing is gained.
"""

from student.data.hooks import ModelHook
from student.job.plugins import Plugins
from student.plugin.controllers import Controller
from student.plugin.terms import Term, TermSettings
from student.scoring.contexts import reads_outcomes
from student.settings.recipe import Recipe

_OF_TERMS = ("assess", "prepare", "selects", "stratum")
_OF_SETTINGS = ("admits", "strata_of", "within_turns")
_OF_METHODS = ("compose", "updates")


def learns_early(recipe: Recipe, plugins: Plugins) -> bool:
    """Whether the gradient of a step may begin before all of its scores have arrived."""
    train = recipe.train
    if train.epochs > 1 or train.minibatches > 1:
        return False
    # Contexts built from outcomes are only known once rows are judged, and their requests are sent after that.
    if any(reads_outcomes(role, context) for role, context in recipe.contexts.items()):
        return False
    if any(isinstance(part, ModelHook) for part in (*plugins.terms, *plugins.controllers)):
        return False
    hooks = [(getattr(type(term), name), getattr(Term, name)) for term in plugins.terms for name in _OF_TERMS]
    for term in plugins.terms:
        hooks += [(getattr(type(term.settings), name), getattr(TermSettings, name)) for name in _OF_SETTINGS]
    for method in plugins.controllers:
        hooks += [(getattr(type(method), name), getattr(Controller, name)) for name in _OF_METHODS]
    hooks += [(type(reward).reward, None) for reward in plugins.rewards.parts]
    hooks.append((type(plugins.strategy).run, None))
    return all(hook is base or getattr(hook, "reads_no_scores", False) for hook, base in hooks)
