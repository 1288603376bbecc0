"""Whether a model takes rows as long as a recipe allows, tried on a small model of its family."""

from collections.abc import Iterator

from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.lengths import most_positions, position_turn, positions_end
from opd.pretrained import read_config
from student.model.model import Weights
from student.model.sibling import sibling
from student.scoring.handshake import too_long
from student.settings.recipe import Recipe

_LONGEST_PASS = 8192
"""Beyond so many tokens, only the last position is tried instead of a whole row."""
_CHEAP = 1e10
"""Parameters times tokens of a pass that takes less than a second."""


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
    most, lm = most_positions(config), sibling(config)
    limit = None if lm is None else positions_end(lm, longest, _whole(lm, longest, most))
    if limit is not None:
        said = too_long(recipe, longest, name, f"model {weights.base!r}", limit)
        raise ConfigError(f"{said}, or use one with more positions.")
    turn = None if lm is None else position_turn(lm, longest)
    if turn is not None and not turn.settles:
        said = too_long(recipe, longest, name, f"model {weights.base!r}", turn.length)
        raise ConfigError(f"{said}, because the positions of longer rows depend on their length, or use another.")
    if most is not None and most < longest:
        yield (
            f"rollouts may have {longest} tokens ({name} + rollout.max_new_tokens), more than the {most} that model "
            f"{weights.base!r} was made for; its answers may be worse beyond them"
        )


def _whole(lm: PreTrainedModel, longest: int, most: int | None) -> float:
    """The longest row to run whole: any, if rows are longer than the model was made for; otherwise a cheap one."""
    return _LONGEST_PASS if most is not None and most < longest else _CHEAP / sum(p.numel() for p in lm.parameters())
