"""What a student's family can do, tried on a small model of it before the weights are loaded."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.pretrained import read_config
from student.data.needs import LOCAL_MODELS, REFERENCE, TEACHER
from student.job.plugins import Plugins
from student.model.model import Student, Weights, attention_of, check_head
from student.model.sibling import sibling
from student.rollout.engine import TransformersRollout
from student.rollout.trial import stated
from student.scoring.handshake import longest_prompt, too_long
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe

_POSITIONS = r"position|seq_len|n_ctx"
"""Names in configs that may stand for a number of positions."""
_LONGEST_PASS = 8192
"""Beyond so many tokens, only the last position is tried instead of a whole row."""


def check_family(plugins: Plugins, settings: ModelSettings, weights: Weights) -> None:
    """Refuse what loading the student or its first rollout would refuse, where the family can be tried.

    Raises:
        ConfigError: if the student has no head or an unknown one, or cannot be decoded.
    """
    config = read_config(weights.base, revision=weights.revision)
    lm = sibling(config, attention_of(settings.attention, config.get_text_config()))
    if lm is None:
        return
    check_head(Student(lm), weights.base)
    if type(plugins.engine) is TransformersRollout:
        from student.rollout.batches import check_batches
        from student.rollout.slots import takes_slots

        if not takes_slots(lm, 1):
            check_batches(lm, 1)


def check_positions(recipe: Recipe, plugins: Plugins, weights: Weights) -> Iterator[str]:
    """Compare the longest rows that the student's weights may read with the positions that it has.

    Yields:
        A note if rows may be longer than what the student was made for, but it takes them.

    Raises:
        ConfigError: if it does not take them.
    """
    prompt, name = _longest_prompt(recipe, plugins)
    longest = recipe.rollout.longest_sequence(prompt)
    config = read_config(weights.base, revision=weights.revision)
    limits = sorted(limit for limit in stated(config.to_dict(), _POSITIONS) if 1 < limit < longest)
    lm = sibling(config) if limits else None
    for limit in limits:
        if lm is not None and _takes(lm, limit) and not _takes(lm, limit + 1):
            said = too_long(recipe, longest, name, f"student {weights.base!r}", limit)
            raise ConfigError(f"{said}, or train a student with more positions.")
    most: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most in limits:
        yield (
            f"rollouts may have {longest} tokens ({name} + rollout.max_new_tokens), more than the {most} that student "
            f"{weights.base!r} was made for (max_position_embeddings); its answers may be worse beyond them"
        )


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


@torch.no_grad()
def _takes(lm: PreTrainedModel, tokens: int) -> bool:
    """Whether the model has positions for so many tokens."""
    try:
        if tokens <= _LONGEST_PASS:
            lm(torch.ones((1, tokens), dtype=torch.long), use_cache=False)
        else:
            at = torch.tensor([[0, tokens - 1]])
            lm(torch.ones_like(at), position_ids=at, use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return False
    return True
