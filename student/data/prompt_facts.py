"""Facts about prompts that follow from the recipe alone: which columns they keep, and whether prompts repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from student.settings.recipe import Recipe


def sources(recipe: Recipe) -> list[Any]:
    """The sources of prompts; a mixture is listed source by source."""
    return list(getattr(recipe.prompts, "mix", None) or [recipe.prompts])


def keeps(recipe: Recipe, column: str) -> bool:
    """Whether a source of prompts keeps `column`; columns of procedural tasks are not known in advance."""
    return any(hasattr(one, "task") or column in one.keep_columns for one in sources(recipe))


def never_again(recipe: Recipe) -> bool:
    """Whether all prompts come from procedural tasks, which hardly ever repeat a prompt."""
    return all(hasattr(one, "task") for one in sources(recipe))
