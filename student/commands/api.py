"""The Python interface to jobs: `opd train` and `opd eval` as functions, and a job without its loop."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import load_settings, parse_settings
from opd.errors import ConfigError
from student.settings.recipe import Recipe

if TYPE_CHECKING:
    from student.commands.own_loop import LoopSession

RecipeLike = Recipe | Mapping[str, Any] | str | Path
"""A recipe as a `Recipe`, as a mapping with its keys, or as the path of a YAML file."""


def train(recipe: RecipeLike, *overrides: str, resume: bool = False) -> dict[str, Any]:
    """Run a training job to its end.

    Args:
        recipe: the recipe of the job.
        overrides: settings that replace those of the file, each "dotted.key=value"; only for a recipe given as a path.
        resume: continue from the newest intact checkpoint of the run folder.

    Returns:
        The run's summary: run (its folder), checkpoint, steps, response_tokens, seconds, and the evaluations before
        and after.

    Raises:
        OpdError: when something stops the run. Each subclass has a readable message and its own exit code.
    """
    from student.job.session import train as run

    return run(_recipe(recipe, overrides), resume=resume)


def session(recipe: RecipeLike, *overrides: str) -> "AbstractContextManager[LoopSession]":
    """Open a job whose loop is the caller's: rollout, score, loss and step, as often as wanted, and save.

    Args:
        recipe: gives the model, prompts, teachers, objective and optimizer; without methods and strategies.
        overrides: settings that replace those of the file, each "dotted.key=value"; only for a recipe given as a path.

    Raises:
        OpdError: as `train` does.
    """
    from student.commands.own_loop import open_session

    return open_session(_recipe(recipe, overrides))


def run_eval(model: str | Path, recipe: RecipeLike, *overrides: str) -> dict[str, Any]:
    """Evaluate a model on the held-out prompts of a recipe.

    Args:
        model: folder or hub id of the model.
        recipe: gives prompts, limits, seed and the `eval` group.
        overrides: settings that replace those of the file, each "dotted.key=value"; only for a recipe given as a path.

    Returns:
        The report of `student.commands.evaluate_model.evaluate_model`: accuracy with the half-width of its 95 %
        interval, reverse_kl (nats per token, with its estimator), mean length, truncation, repetition, and accuracy by
        domain.

    Raises:
        OpdError: as `train` does.
    """
    from student.commands.evaluate_model import evaluate_model

    return evaluate_model(_recipe(recipe, overrides), str(model))


def _recipe(recipe: RecipeLike, overrides: tuple[str, ...]) -> Recipe:
    if isinstance(recipe, str | Path):
        return load_settings(Recipe, recipe, overrides)
    if overrides:
        raise ConfigError(
            f"overrides ({overrides[0]}) are for recipes given as a file; change the settings themselves instead."
        )
    return recipe if isinstance(recipe, Recipe) else parse_settings(Recipe, dict(recipe))
