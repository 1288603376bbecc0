"""The plans of the preset worlds, and the keys that identify what a world was built from."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from opd.errors import ConfigError
from opd.tasks import TaskSettings
from opd_lab.tiny.files import is_world_file, read_world
from opd_lab.tiny.plans import MergePlan, ModelPlan, ReinforcePlan, SftPlan, Shape, TrainingStage, WorldPlan

FORMAT = 3
"""Raised when a change of the code changes the weights that a plan gives."""


def _test() -> WorldPlan:
    """Hardly trained models, built in seconds: one has padded vocabulary rows, another has other token ids."""
    long, short = ((TrainingStage(SftPlan(steps=steps, batch=32), ("addition",)),) for steps in (20, 10))
    return WorldPlan(
        tasks={"addition": TaskSettings(task="addition", options={"digits": 2})},
        models={
            "student": ModelPlan(Shape(hidden=32, layers=2, heads=2), long),
            "teacher": ModelPlan(Shape(hidden=64, layers=2, heads=2), short),
            "padded": ModelPlan(Shape(hidden=64, layers=2, heads=2, vocabulary=272, tied=False), short),
            "stranger": ModelPlan(Shape(hidden=32, layers=2, heads=2), shuffled=True),
        },
        max_new_tokens=12,
        measured=4,
    )


def _demo() -> WorldPlan:
    """Two-digit sums: a teacher that is nearly always right, and a smaller student that is mostly wrong."""
    sums = ("addition",)
    return WorldPlan(
        tasks={"addition": TaskSettings(task="addition", options={"digits": 2})},
        models={
            "student": ModelPlan(Shape(hidden=96, layers=2), (TrainingStage(SftPlan(steps=400, until=0.25), sums),)),
            "teacher": ModelPlan(
                Shape(hidden=128, layers=2), (TrainingStage(SftPlan(steps=560, lr=4e-3, noise=0.1), sums),)
            ),
        },
        max_new_tokens=12,
        measured=512,
    )


def _lab() -> WorldPlan:
    """A base model, domain teachers reinforced from it, and a larger teacher with its own base, on several tasks.

    Sums and differences are the two domains. In `restate` the tail of an answer follows from its prefix; in `parts` it
    does not.
    """
    tasks = {
        "addition": TaskSettings(task="addition", options={"digits": 2}),
        "subtraction": TaskSettings(task="subtraction", options={"digits": 2}),
        "restate": TaskSettings(task="restate", options={"digits": 2, "times": 6}),
        "parts": TaskSettings(task="parts", options={"digits": 2, "operations": ["addition", "subtraction"]}),
    }
    every = tuple(tasks)
    small, large = Shape(hidden=96, layers=2), Shape(hidden=128, layers=3)
    reinforced = ReinforcePlan(steps=300)
    return WorldPlan(
        tasks=tasks,
        models={
            "base": ModelPlan(small, (TrainingStage(SftPlan(steps=1500, until=0.3), every),)),
            "addition": ModelPlan(small, (TrainingStage(reinforced, ("addition",)),), parent="base"),
            "subtraction": ModelPlan(small, (TrainingStage(reinforced, ("subtraction",)),), parent="base"),
            "large_base": ModelPlan(large, (TrainingStage(SftPlan(steps=1500, lr=4e-3, until=0.3), every),)),
            "large": ModelPlan(
                large,
                (TrainingStage(SftPlan(steps=1200, lr=3e-3, noise=0.1, start=200_000), every),),
                parent="large_base",
            ),
        },
        max_new_tokens=48,
        measured=512,
    )


PRESETS = {"test": _test, "demo": _demo, "lab": _lab}
"""Functions that make the plan of each preset, by name."""


def world_plan(preset: str) -> WorldPlan:
    """Return the plan of a preset, or of the world file whose path is `preset` (ending in .yaml or .yml).

    Raises:
        ConfigError: for an unknown preset, or a file that does not describe a world.
    """
    if is_world_file(preset):
        return read_world(preset)
    if preset not in PRESETS:
        raise ConfigError(f"there is no preset {preset!r} of a tiny world; known: {', '.join(PRESETS)}.")
    return PRESETS[preset]()


def world_key(plan: WorldPlan, seed: int) -> str:
    """Hash of all that decides the weights of a world, as 16 hex digits."""
    text = json.dumps([FORMAT, seed, _canonical(plan)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_KINDS = {SftPlan: "sft", ReinforcePlan: "reinforce", MergePlan: "merge"}
"""Names for the classes of a plan that cannot be told apart by their fields."""


def _canonical(part: Any) -> Any:
    """A part of a plan as JSON values, without fields that have their default value.

    Names of other classes are left out too. So the key of a world, which may take an hour to build, changes only if its
    weights do.
    """
    if isinstance(part, BaseModel):
        return part.model_dump(mode="json", exclude_defaults=True)
    if is_dataclass(part):
        given = {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
        kind = _KINDS.get(type(part))  # type: ignore[arg-type]
        return {**_canonical(given), **({"kind": kind} if kind else {})}
    if isinstance(part, Mapping):
        return {name: _canonical(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return [_canonical(value) for value in part]
    return part
