"""Facts about prompts that follow from the recipe alone: which columns they keep, and whether prompts repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError

if TYPE_CHECKING:
    from student.settings.recipe import Recipe


def sources(recipe: Recipe) -> list[Any]:
    """The sources of prompts; a mixture is listed source by source."""
    return list(getattr(recipe.prompts, "mix", None) or [recipe.prompts])


def check_kept(recipe: Recipe, column: str, who: str) -> None:
    """Refuse a column that no source of prompts keeps; columns of procedural tasks are not known in advance.

    Args:
        recipe: the recipe.
        column: the column.
        who: what reads the column, for the message.

    Raises:
        ConfigError: naming the setting that keeps it.
    """
    if not any(hasattr(one, "task") or column in one.keep_columns for one in sources(recipe)):
        raise ConfigError(
            f"{who} reads column {column!r}, which is not kept with the prompts, so it would do nothing; add it to "
            "prompts.keep_columns."
        )


def never_again(recipe: Recipe) -> bool:
    """Whether all prompts come from procedural tasks, which hardly ever repeat a prompt."""
    return all(hasattr(one, "task") for one in sources(recipe))
