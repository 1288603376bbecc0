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
the classes in student/lab/tiny/plans.py.

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
from student.lab.tiny.plans import MergePlan, ModelPlan, ReinforcePlan, SftPlan, Shape, TrainingStage, WorldPlan
from student.rollout.episodes import EpisodeSettings

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

    tasks: list[str] = Field(default_factory=list, description="Names of the world's tasks; all when none is named.")
    sft: _SFT | None = Field(None, description="Supervised training on worked solutions.")
    reinforce: _REINFORCE | None = Field(None, description="Reinforcement on the verifier's score.")

    @model_validator(mode="after")
    def _one(self) -> "StageSettings":
        if (self.sft is None) == (self.reinforce is None):
            raise ValueError("a stage is either sft or reinforce; give one of them")
        return self


class WorldModelSettings(Settings):
    """One model."""

    shape: _SHAPE | None = Field(None, description="Its size; left out for a model with a parent.")
    parent: str | None = Field(None, description="An earlier model of the file whose weights it starts from.")
    merge: list[str] = Field(
        default_factory=list, description="Earlier models of one shape whose mean it starts from, two at least."
    )
    stages: list[StageSettings] = Field(default_factory=list, description="Its training, in order.")

    @model_validator(mode="after")
    def _sized(self) -> "WorldModelSettings":
        if (self.shape is not None) + (self.parent is not None) + bool(self.merge) != 1:
            raise ValueError("a model has a shape, a parent or models to merge; give one of the three")
        if len(self.merge) == 1:
            raise ValueError("a merge takes two models at least; make a single one the parent")
        return self


class WorldSettings(Settings):
    """A world."""

    tasks: dict[str, TaskSettings] = Field(min_length=1, description="The tasks by name, as a recipe's prompts.")
    models: dict[str, WorldModelSettings] = Field(min_length=1, description="The models by name, in order of building.")
    max_new_tokens: int = Field(32, ge=1, description="Enough tokens for every correct answer.")
    measured: int = Field(256, ge=1, description="Held-out prompts per task on which each model is measured.")
    episodes: EpisodeSettings | None = Field(None, description="How prompts are played, where tasks are environments.")


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
                raise ConfigError(f"{path}: model {name!r} starts from {origin!r}; models before it: {known}.")
        shapes = {models[origin].shape for origin in origins}
        if len(shapes) > 1:
            raise ConfigError(f"{path}: model {name!r} merges {', '.join(origins)}, which differ in shape.")
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
            raise ConfigError(f"{path}: a stage names task {task!r}; the file has {', '.join(tasks)}.")
    given: Any = stage.reinforce if stage.sft is None else stage.sft
    kind = ReinforcePlan if stage.sft is None else SftPlan
    return TrainingStage(kind(**dict(given)), tuple(stage.tasks) or tasks)
