"""What a student's family can do, tried on a small model of it before the weights are loaded."""

from collections.abc import Iterator

from opd.attention import keep_scores
from opd.pretrained import read_config
from student.data.needs import LOCAL_MODELS, REFERENCE, TEACHER
from student.job.plugins import Plugins
from student.model.model import Student, Weights, check_head
from student.model.sibling import sibling
from student.rollout.engine import TransformersRollout
from student.rollout.row_length import check_length
from student.scoring.handshake import longest_prompt
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe


def check_family(plugins: Plugins, settings: ModelSettings, weights: Weights) -> None:
    """Refuse what loading the student or its first rollout would refuse, where the family can be tried.

    Raises:
        ConfigError: if the student has no head or an unknown one, or cannot be decoded.
    """
    config = read_config(weights.base, revision=weights.revision)
    lm = sibling(config, settings.attention)
    if lm is None:
        return
    keep_scores(lm, settings.attention, "model.attention")
    check_head(Student(lm), weights.base)
    if type(plugins.engine) is TransformersRollout:
        from student.rollout.batches import check_batches
        from student.rollout.slots import takes_slots

        if not takes_slots(lm, 1):
            check_batches(lm, 1)


def check_positions(recipe: Recipe, plugins: Plugins, weights: Weights) -> Iterator[str]:
    """As `check_length`, for the longest rows that the student's weights may read."""
    return check_length(recipe, weights, *_longest_prompt(recipe, plugins))


def _longest_prompt(recipe: Recipe, plugins: Plugins) -> tuple[int, str]:
    """As `longest_prompt`, of all models that have the student's weights or had them."""
    teachers = recipe.teachers
    asked = [] if teachers is None else [teachers.default, *teachers.routes.values()]
    taught = {name for one in asked if one is not None for name in ([one] if isinstance(one, str) else one)}
    found = [longest_prompt(recipe, "", ())]
    for name in LOCAL_MODELS:
        roles = {name} if name in plugins.needs.local else set()
        roles |= {TEACHER} if name in taught else set()
        roles |= {REFERENCE} if teachers is not None and teachers.reference == name else set()
        found += [longest_prompt(recipe, name, roles)] if roles else []
    return max(found)
