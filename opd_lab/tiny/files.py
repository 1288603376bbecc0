"""Reads world files: YAML files that say which tasks and models a world has, and how each model is trained.

    max_new_tokens: 24
    tasks:
      sorting: {task: sorting, options: {letters: 4}}       # or a dotted path, task: my_task:Reverse
    models:
      base:    {shape: {hidden: 96, layers: 2}, stages: [{sft: {steps: 600, until: 0.3}}]}
      teacher: {parent: base, stages: [{reinforce: {steps: 300}}]}
      middle:  {merge: [base, teacher]}

A stage trains on all tasks unless it names some. A model with a parent starts from its weights and has its shape; a
merged one starts from the mean of other models (extra `merge`). The keys of `shape`, `sft` and `reinforce` are those of
the classes in opd_lab/tiny/plans.py.

In a world with the key `episodes` ({turns: 18, turn_tokens: 2}), tasks are environments: sft plays the paths that solve
their problems and learns the actions, and a model's accuracy is the share of its episodes that end in success.
"""

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import Field, create_model, model_validator

from opd.config import Settings, load_settings
from opd.errors import ConfigError
from opd.tasks import TaskSettings
from opd_lab.tiny.plans import MergePlan, ModelPlan, ReinforcePlan, SftPlan, Shape, TrainingStage, WorldPlan
from student.settings.episodes import EpisodeSettings

SUFFIXES = (".yaml", ".yml")


class _Made(Settings, use_attribute_docstrings=False):
    """Base of settings made at run time, for whose docstrings pydantic would search the source of all stack frames."""


def _settings_of(plan: type) -> Any:
    """Make a settings class with the fields and defaults of a dataclass, so that these are declared only once."""
    hints = get_type_hints(plan)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(plan)
    }
    return create_model(f"{plan.__name__}Settings", __base__=_Made, **fields)


_SHAPE: Any = _settings_of(Shape)
_SFT: Any = _settings_of(SftPlan)
_REINFORCE: Any = _settings_of(ReinforcePlan)


class StageSettings(Settings):
    """One piece of training."""

    tasks: list[str] = Field(default_factory=list, description="Names of the world's tasks to train on. Default: all.")
    sft: _SFT | None = Field(None, description="Supervised training on the tasks' worked solutions.")
    reinforce: _REINFORCE | None = Field(
        None, description="Reinforcement learning with the verifier's score as reward."
    )

    @model_validator(mode="after")
    def _one(self) -> "StageSettings":
        if (self.sft is None) == (self.reinforce is None):
            raise ValueError("a stage needs exactly one of the keys sft and reinforce")
        return self


class WorldModelSettings(Settings):
    """One model."""

    shape: _SHAPE | None = Field(None, description="Size of the model; left out for one with a parent or a merge.")
    parent: str | None = Field(
        None, description="Name of an earlier model of the file, from whose weights this one starts."
    )
    merge: list[str] = Field(
        default_factory=list,
        description="Names of at least two earlier models of equal shape, from the mean of whose weights this one "
        "starts.",
    )
    stages: list[StageSettings] = Field(default_factory=list, description="Training stages of the model, in order.")

    @model_validator(mode="after")
    def _sized(self) -> "WorldModelSettings":
        if (self.shape is not None) + (self.parent is not None) + bool(self.merge) != 1:
            raise ValueError("a model needs exactly one of the keys shape, parent and merge")
        if len(self.merge) == 1:
            raise ValueError("merge needs at least two models; for a single one use parent")
        return self


class WorldSettings(Settings):
    """A world."""

    tasks: dict[str, TaskSettings] = Field(
        min_length=1, description="Tasks by name, each written like the prompts of a recipe."
    )
    models: dict[str, WorldModelSettings] = Field(
        min_length=1, description="Models by name, in the order in which they are built."
    )
    max_new_tokens: int = Field(
        32, ge=1, description="Maximum tokens of an answer; it must leave room for every correct one."
    )
    measured: int = Field(
        256, ge=1, description="Number of held-out prompts per task on which each model's accuracy is measured."
    )
    episodes: EpisodeSettings | None = Field(None, description="How episodes are played, for tasks with environments.")


def is_world_file(name: str | Path) -> bool:
    """Whether `name` is the path of a world file, by its suffix, rather than the name of a preset."""
    return str(name).endswith(SUFFIXES)


def read_world(path: str | Path) -> WorldPlan:
    """Read the plan of a world from a file.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key, a task that the file does not have, a model that
            starts from one not listed before it, or a merge of different shapes.
    """
    found = load_settings(WorldSettings, path)
    models: dict[str, ModelPlan] = {}
    for name, model in found.models.items():
        origins = [model.parent] if model.parent is not None else model.merge
        for origin in origins:
            if origin not in models:
                known = ", ".join(models) or "none"
                raise ConfigError(
                    f"{path}: model {name!r} starts from {origin!r}, which is not listed before it; models before it: "
                    f"{known}."
                )
        shapes = {models[origin].shape for origin in origins}
        if len(shapes) > 1:
            raise ConfigError(
                f"{path}: model {name!r} merges {', '.join(origins)}, which differ in shape; merge models of one shape."
            )
        size: Any = model.shape
        shape = shapes.pop() if shapes else Shape(**dict(size))
        stages = tuple(_stage(path, stage, tuple(found.tasks)) for stage in model.stages)
        if model.merge:
            models[name] = MergePlan(shape, stages, merged=tuple(model.merge))
        else:
            models[name] = ModelPlan(shape, stages, parent=model.parent)
    return WorldPlan(found.tasks, models, found.max_new_tokens, found.measured, found.episodes)


def _stage(path: str | Path, stage: StageSettings, tasks: tuple[str, ...]) -> TrainingStage:
    for task in stage.tasks:
        if task not in tasks:
            raise ConfigError(f"{path}: a stage names task {task!r}, but the file has {', '.join(tasks)}.")
    given: Any = stage.reinforce if stage.sft is None else stage.sft
    kind = ReinforcePlan if stage.sft is None else SftPlan
    return TrainingStage(kind(**dict(given)), tuple(stage.tasks) or tasks)
