"""The description of a built world, as `build_world` returns it and world.json stores it."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from opd.errors import DataError
from opd.files import write_whole

FILE = "world.json"


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of a world.

    Attributes:
        path: its folder, with weights, tokenizer and generation config that transformers can load.
        parameters: number of parameters, with a tied head counted once.
        hidden: width of the residual stream.
        layers: number of decoder layers.
        vocabulary: number of rows of the embedding.
        greedy: accuracy of greedy answers on held-out prompts, by task.
        sampled: accuracy at temperature 1, by task.
        seconds: time that it took to train and measure it.
    """

    path: Path
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    greedy: dict[str, float] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorldSummary:
    """A world: its models, and the tasks that they were trained and measured on.

    Attributes:
        folder: its folder.
        preset: name of its preset, or of its world file without suffix.
        seed: its seed.
        key: hash of all that decides the weights; equal keys mean equal plans and seeds.
        tasks: settings of each task by name, in the form of a recipe's `prompts`.
        models: its models by name.
        max_new_tokens: maximum tokens of an answer, enough for every correct one.
        complete: whether all models are built.
        seconds: total time spent building.
        cached: whether the call that returned it found it complete and built nothing.
    """

    folder: Path
    preset: str
    seed: int
    key: str
    tasks: dict[str, dict[str, Any]]
    models: dict[str, ModelSummary]
    max_new_tokens: int
    complete: bool = False
    seconds: float = 0.0
    cached: bool = False


def write_summary(world: WorldSummary) -> None:
    """Write world.json atomically, with the paths of models relative to its folder."""
    data = asdict(world)
    del data["folder"], data["cached"]
    for name in data["models"]:
        data["models"][name]["path"] = name
    write_whole(world.folder / FILE, json.dumps(data, indent=2) + "\n")


def read_summary(folder: Path) -> WorldSummary | None:
    """Read the world in `folder`; None if there is no world.json.

    Models without weights are left out, and the world then counts as not complete.

    Raises:
        DataError: when world.json cannot be read.
    """
    target = folder / FILE
    if not target.exists():
        return None
    try:
        data = json.loads(target.read_text(encoding="utf-8"))
        found = {name: ModelSummary(**{**model, "path": folder / name}) for name, model in data.pop("models").items()}
        world = WorldSummary(folder=folder, models=found, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{target} is damaged or of another version of opd ({error}); remove the folder and build the world again."
        ) from error
    present = {name: model for name, model in found.items() if (model.path / "model.safetensors").exists()}
    return world if present == found else replace(world, models=present, complete=False)
