"""Whether a model takes rows as long as a recipe allows, tried on a small model of its family."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.lengths import POSITIONS, most_positions, position_turn, stated
from opd.pretrained import read_config
from student.model.model import Weights
from student.model.sibling import sibling
from student.scoring.handshake import too_long
from student.settings.recipe import Recipe

_LONGEST_PASS = 8192
"""Beyond so many tokens, only the last position is tried instead of a whole row."""


def check_length(recipe: Recipe, weights: Weights, prompt: int, name: str) -> Iterator[str]:
    """Compare the longest rows that a model may read with the positions that it has, before its weights are loaded.

    Args:
        recipe: gives the limit of answers.
        weights: the model.
        prompt: the most tokens that it reads before an answer.
        name: the setting that limits them.

    Yields:
        A note if rows may be longer than what it was made for, but it takes them.

    Raises:
        ConfigError: if it does not take them.
    """
    longest = recipe.rollout.longest_sequence(prompt)
    config = read_config(weights.base, revision=weights.revision)
    limits = sorted(limit for limit in stated(config, POSITIONS) if 1 < limit < longest)
    lm = sibling(config) if limits else None
    for limit in limits:
        if lm is not None and _takes(lm, limit) and not _takes(lm, limit + 1):
            said = too_long(recipe, longest, name, f"model {weights.base!r}", limit)
            raise ConfigError(f"{said}, or use one with more positions.")
    turn = None if lm is None else position_turn(lm, longest)
    if turn is not None and not turn.settles:
        said = too_long(recipe, longest, name, f"model {weights.base!r}", turn.length)
        raise ConfigError(f"{said}, because the positions of longer rows depend on their length, or use another.")
    most = most_positions(config)
    if most in limits:
        yield (
            f"rollouts may have {longest} tokens ({name} + rollout.max_new_tokens), more than the {most} that model "
            f"{weights.base!r} was made for; its answers may be worse beyond them"
        )


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
