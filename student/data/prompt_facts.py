"""What a recipe says of its prompts before any is read: which columns they keep, and whether they come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError

if TYPE_CHECKING:
    from student.recipe import Recipe


def sources(recipe: Recipe) -> list[Any]:
    """The sources of prompts, those of a mix one by one."""
    return list(getattr(recipe.prompts, "mix", None) or [recipe.prompts])


def check_kept(recipe: Recipe, column: str, who: str) -> None:
    """Refuse a column that no source of prompts keeps; what a procedural task gives is known once it is asked.

    Args:
        recipe: the recipe.
        column: the column.
        who: reads it, for the message.

    Raises:
        ConfigError: naming the setting that keeps it.
    """
    if not any(hasattr(one, "task") or column in one.keep_columns for one in sources(recipe)):
        raise ConfigError(
            f"{who} reads column {column!r}, which prompts do not keep, so that it would do nothing; name it in "
            "prompts.keep_columns."
        )


def never_again(recipe: Recipe) -> bool:
    """Whether all prompts come from procedural tasks, which hardly ever give one twice."""
    return all(hasattr(one, "task") for one in sources(recipe))
