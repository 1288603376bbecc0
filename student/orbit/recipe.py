"""The recipe of `opd orbit`: modes, the keys of their stages, the merge, and where teachers are served."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from opd.config import Settings, parse_settings
from opd.tasks.modes import ModeSettings
from opd.tasks.settings import PromptSettings
from student.orbit.merge import NEEDS_BASE, MergeModel, MergeSettings, Method
from student.recipe import ModelSettings, Recipe
from student.run.local_server import CPU

FUSION, MERGE = "fusion", "merge"


class MergeRule(Settings):
    """How the modes' teachers become the student that fusion starts from."""

    method: Method = Field("linear", description="See `opd merge`; rules that need a base take the recipe's model.")
    weights: dict[str, float] = Field(default_factory=dict, description="By mode; 1 where a mode is not named.")
    density: float = Field(0.5, gt=0, le=1, description="See `opd merge`.")
    scale: float = Field(1.0, description="See `opd merge`.")
    dtype: str = Field("float32", description="Of the merged weights: float32, bfloat16 or float16.")


class ServingSettings(Settings):
    """Where the modes' teachers are served while the student is fused."""

    endpoints: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Mode to the servers of its teacher, which are given its weights (scope admin, a folder that they "
        "can read too); none: servers are started on this machine.",
    )
    flags: list[str] = Field(
        default_factory=lambda: list(CPU),
        description="Of `opd serve` for servers that are started here.",
    )
    security: dict[str, Any] = Field(
        default_factory=dict, description="teachers.fleet.security of the fusion's recipe, for given endpoints."
    )


class OrbitRecipe(Settings):
    """A student with several thinking budgets: reinforcement per mode, merge, fusion (arXiv 2601.08310)."""

    run: Path = Field(description="Folder of all stages.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of all stages.")
    model: ModelSettings = Field(description="The student before the first stage.")
    prompts: PromptSettings = Field(description="Training and held-out prompts of all stages.")
    modes: dict[str, ModeSettings] = Field(
        min_length=2, description="By name, from the widest budget to the narrowest."
    )
    rl: dict[str, Any] = Field(
        description="Keys of the reinforcement stages' recipes: objective, rollout, train, eval."
    )
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Mode to keys that differ in its stage; groups are merged key by key."
    )
    merge: MergeRule = Field(default_factory=MergeRule, description="From the modes' teachers to one student.")
    fusion: dict[str, Any] = Field(description="Keys of the fusion's recipe: objective, rollout, train, eval.")
    teachers: ServingSettings = Field(default_factory=ServingSettings, description="Where teachers are served.")
    launch: list[str] = Field(
        default_factory=list,
        description="What a stage is started with instead of this Python, for example torchrun --nproc-per-node 8.",
    )

    @model_validator(mode="after")
    def _check(self) -> "OrbitRecipe":
        names = list(self.modes)
        for wide, narrow in pairwise(names):
            if self.modes[narrow].budget >= self.modes[wide].budget:
                raise ValueError(
                    f"budgets must fall from mode to mode, but {narrow} has {self.modes[narrow].budget} after "
                    f"{self.modes[wide].budget} of {wide}; list modes from the widest budget to the narrowest"
                )
        for key, found in (("stages", self.stages), ("merge.weights", self.merge.weights)):
            unknown = sorted(found.keys() - self.modes.keys())
            if unknown:
                raise ValueError(f"{key} names {', '.join(unknown)}, but modes are {', '.join(names)}")
        unserved = sorted(self.modes.keys() - self.teachers.endpoints.keys()) if self.teachers.endpoints else []
        if unserved:
            raise ValueError(f"teachers.endpoints serves no teacher of mode {', '.join(unserved)}; name its servers")
        return self

    @property
    def teacher_names(self) -> dict[str, str]:
        """The name that each mode's teacher is served under."""
        return {name: mode.teacher or name for name, mode in self.modes.items()}

    def stage_folder(self, stage: str) -> Path:
        """The run folder of a stage, or of the merged model."""
        return self.run / "stages" / stage


def rl_recipe(orbit: OrbitRecipe, mode: str, model: str) -> Recipe:
    """The recipe of a mode's reinforcement stage, which starts from the folder `model`."""
    keys = _merged(orbit.rl, orbit.stages.get(mode, {}))
    return _recipe(orbit, mode, model, keys, {mode: orbit.modes[mode]})


def fusion_recipe(orbit: OrbitRecipe, model: str, endpoints: dict[str, list[str]] | list[str]) -> Recipe:
    """The recipe of the fusion: on-policy distillation, every row from the teacher of its own mode.

    Args:
        orbit: the whole recipe.
        model: folder of the merged student.
        endpoints: of the teachers, as `teachers.endpoints`.
    """
    teachers: dict[str, Any] = {"endpoints": endpoints}
    if orbit.teachers.security:
        teachers["fleet"] = {"security": orbit.teachers.security}
    return _recipe(orbit, FUSION, model, _merged({"teachers": teachers}, orbit.fusion), orbit.modes)


def merge_settings(orbit: OrbitRecipe, models: dict[str, str]) -> MergeSettings:
    """The merge of the modes' teachers, by mode."""
    rule = orbit.merge
    raw = {
        "method": rule.method,
        "models": [MergeModel(path=path, weight=rule.weights.get(mode, 1.0)) for mode, path in models.items()],
        "base": orbit.model.path if rule.method in NEEDS_BASE else None,
        "density": rule.density,
        "scale": rule.scale,
        "seed": orbit.seed,
        "dtype": rule.dtype,
    }
    return parse_settings(MergeSettings, raw, source="merge")


def _recipe(orbit: OrbitRecipe, stage: str, model: str, keys: dict[str, Any], modes: dict[str, ModeSettings]) -> Recipe:
    longest = max(mode.budget for mode in modes.values())
    raw = {
        "run": orbit.stage_folder(stage),
        "seed": orbit.seed,
        "model": orbit.model.model_dump() | ({} if model == orbit.model.path else {"path": model, "revision": None}),
        "prompts": orbit.prompts.model_dump(),
        "modes": {name: mode.model_dump() for name, mode in modes.items()},
    }
    limits = {"rollout": {"max_new_tokens": longest}}
    return parse_settings(Recipe, _merged(_merged(raw, keys), limits), source=f"stage {stage}")


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`other` over `one`, group by group."""
    out = dict(one)
    for key, value in other.items():
        mine = out.get(key)
        out[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return out
