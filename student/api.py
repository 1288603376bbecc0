"""Jobs from Python: what `opd train` and `opd eval` do, as functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.config import load_settings, parse_settings
from opd.errors import ConfigError
from student.recipe import Recipe

RecipeLike = Recipe | Mapping[str, Any] | str | Path
"""A recipe: the settings themselves, a dictionary of them, or the path of a YAML file."""


def train(recipe: RecipeLike, *overrides: str, resume: bool = False) -> dict[str, Any]:
    """Train a student to the end of its recipe.

    Args:
        recipe: the job.
        overrides: "dotted.key=value", for recipes given as a file.
        resume: go on from the newest intact checkpoint of the run folder.

    Returns:
        run (folder), checkpoint, steps, response_tokens, seconds, and the evaluations before and after.

    Raises:
        OpdError: what stops a run, with a readable message and an exit code of its own.
    """
    from student.loop import train as run

    return run(_recipe(recipe, overrides), resume=resume)


def run_eval(model: str | Path, recipe: RecipeLike, *overrides: str) -> dict[str, Any]:
    """Evaluate a model on the held-out prompts of a recipe.

    Args:
        model: folder or hub id.
        recipe: gives prompts, limits, seed and the `eval` group.
        overrides: "dotted.key=value", for recipes given as a file.

    Returns:
        accuracy with the half width of its 95 % interval, reverse_kl (nats per token, with its estimator), length,
        truncation, repetition, and the same by domain.

    Raises:
        OpdError: as `train`.
    """
    from student.evaluate_model import evaluate_model

    return evaluate_model(_recipe(recipe, overrides), str(model))


def _recipe(recipe: RecipeLike, overrides: tuple[str, ...]) -> Recipe:
    if isinstance(recipe, str | Path):
        return load_settings(Recipe, recipe, overrides)
    if overrides:
        raise ConfigError(
            f"overrides ({overrides[0]}) are for recipes given as a file; change the settings themselves."
        )
    return recipe if isinstance(recipe, Recipe) else parse_settings(Recipe, dict(recipe))
