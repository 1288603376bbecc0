"""Checks which settings may change when a run is resumed: all except those that the saved state depends on.

Steps, learning rate, batch sizes, prompts, evaluation, mixed precision and the number of ranks may change; with the
same settings and ranks, the resumed run equals the uninterrupted one bit for bit. The keys in `FIXED` may not change.
What may change in lists of plug-ins is in `student.state.named_states`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.errors import CheckpointError, ConfigError

FIXED = {
    "seed": "every random stream is derived from it",
    "model.path": "the saved weights belong to that model; if it has moved, put a link at its old place",
    "model.revision": "the saved weights belong to that revision",
    "model.dtype": "the saved weights are of that type",
    "train.max_staleness": "the checkpoint holds the steps that were being sampled under it",
    "model.lora": "the saved weights are such adapters, or a whole model if it is null",
    "model.lora.rank": "the saved adapters have that rank",
    "model.lora.alpha": "the saved adapters were trained with it",
    "model.lora.targets": "the saved adapters are those of these layers",
    "model.lora.dora": "the saved adapters are of that kind",
    "model.lora.quantize": "the saved adapters were trained over such a base",
    "model.lora.start": "model initial is the model that the run began with",
}
"""Keys that may not change, each with the reason, a clause."""


def check_resumable(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse to resume with a recipe that the saved state does not fit.

    Args:
        saved: the recipe in the run folder, as JSON values.
        recipe: the recipe to resume with, likewise.

    Raises:
        CheckpointError: naming the first key that differs, and both values.
    """
    for key, why in FIXED.items():
        before, now = _value(saved, key), _value(recipe, key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            continue  # the keys of the group come later in FIXED
        if before != now and not (key == "model.path" and _same_folder(before, now)):
            raise CheckpointError(
                f"{key} was {_shown(before)} in this run and is {_shown(now)} now, but {why}; resume with "
                f"{_shown(before)}, or begin a new run."
            )


def _same_folder(before: str, now: str) -> bool:
    """Whether two paths of a model name the same folder, for example one relative and one absolute, or by a link."""
    places = [Path(name).expanduser() for name in (before, now)]
    return all(place.exists() for place in places) and places[0].resolve() == places[1].resolve()


def check_steps(checkpoint: Path | None, steps: int) -> None:
    """Refuse to train to a step that is before the saved state.

    Args:
        checkpoint: the newest checkpoint, or None.
        steps: `train.steps` of the recipe to resume with.

    Raises:
        ConfigError: naming both.
    """
    done = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
    if done > steps:
        raise ConfigError(
            f"train.steps is {steps}, but the newest checkpoint is of step {done}: {checkpoint}; set train.steps to "
            f"more than {done} to continue, or to {done} to end the run there with its last evaluation."
        )


def _value(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r}"
