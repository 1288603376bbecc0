"""What may change between a run and its resumption: everything but what the saved state is made of.

Steps, learning rate, batch sizes, prompts, evaluation, mixed precision and the number of ranks may change; with the
same settings and ranks the resumed run is the uninterrupted one bit for bit. `FIXED` may not.
"""

from collections.abc import Mapping
from typing import Any

from opd.errors import CheckpointError

FIXED = {
    "seed": "every random stream is keyed by it",
    "model.dtype": "the saved weights have it",
    "train.max_staleness": "the checkpoint holds the steps that were being sampled with it",
    "model.lora": "the saved weights are such adapters, or whole models where it is null",
    "model.lora.rank": "the saved adapters have it",
    "model.lora.alpha": "the saved adapters have it",
    "model.lora.targets": "the saved adapters have them",
    "model.lora.dora": "the saved adapters are of that kind",
    "model.lora.quantize": "the saved adapters were trained over such a base",
    "model.lora.start": "the reference initial is what the run began with",
}
"""Keys that may not change, each with the reason, a clause."""


def check_resumable(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse to go on with a recipe that the saved state does not fit.

    Args:
        saved: the recipe in the run folder, JSON values.
        recipe: the one to go on with, likewise.

    Raises:
        CheckpointError: naming the first key that differs, and both values.
    """
    for key, why in FIXED.items():
        before, now = _value(saved, key), _value(recipe, key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            continue  # the keys of the group come later in FIXED
        if before != now:
            raise CheckpointError(
                f"{key} was {_shown(before)} in this run and is {_shown(now)} now, but {why}; resume with "
                f"{_shown(before)}, or begin a new run."
            )


def _value(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r}"
