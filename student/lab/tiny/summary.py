"""What a world is made of, as written to its world.json and returned to the caller."""

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
        path: its folder: weights, tokenizer and generation config, as plain transformers loads them.
        parameters: number of weights, a tied head counted once.
        hidden: width.
        layers: depth.
        vocabulary: rows of the embedding.
        greedy: share of held-out prompts answered correctly by greedy decoding, per task.
        sampled: the same at temperature 1.
        seconds: time to train and measure it.
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
        folder: where it is.
        preset: its preset.
        seed: its seed.
        key: hash of all that decides the weights; equal keys mean equal recipes.
        tasks: name -> settings of the task, as a recipe's `prompts` takes them.
        models: name -> model.
        max_new_tokens: enough tokens for every correct answer.
        complete: whether all models are there.
        seconds: time spent building.
        cached: whether this call found the world finished and built nothing.
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
    """Write world.json in one step, with model folders relative to it."""
    data = asdict(world)
    del data["folder"], data["cached"]
    for name in data["models"]:
        data["models"][name]["path"] = name
    write_whole(world.folder / FILE, json.dumps(data, indent=2) + "\n")


def read_summary(folder: Path) -> WorldSummary | None:
    """The world in `folder`, or None when there is none; models whose folder is gone are left out.

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
        raise DataError(f"{target} is damaged ({error}); remove the folder and build the world again.") from error
    present = {name: model for name, model in found.items() if (model.path / "model.safetensors").exists()}
    return world if present == found else replace(world, models=present, complete=False)
