"""The recipe of `opd orbit`, and the ordinary recipes of its stages that are made from it."""

import hashlib
import json
from collections.abc import KeysView, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from opd.config import Settings, parse_settings
from opd.tasks.modes import ModeSettings
from opd.tasks.settings import PromptSettings
from student.orbit.merge import NEEDS_BASE, MergeModel, MergeSettings, Method
from student.run.local_server import CPU
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe

FUSION, MERGE = "fusion", "merge"
LEAKAGE = 16
"""Number of problems on which the fusion measures leakage between modes, unless its keys say otherwise."""


class MergeRule(Settings):
    """How the modes' teachers are merged into the student that the fusion starts from."""

    method: Method = Field(
        "linear",
        description="Rule of the merge, see `opd merge --help`; rules that need a base model take the recipe's model.",
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weight in the merge of each mode's teacher, by mode; 1 for modes that are not named.",
    )
    density: float = Field(
        0.5, gt=0, le=1, description="Share of each teacher's difference from the base that rules ties and dare keep."
    )
    scale: float = Field(1.0, description="Factor on the summed differences from the base, for rules that need one.")
    dtype: str = Field("float32", description="Dtype of the merged weights: float32, bfloat16 or float16.")


class ServingSettings(Settings):
    """Where the modes' teachers are served while the student is fused."""

    endpoints: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Map from each mode to the addresses of its teacher's servers. The weights are pushed to them, "
        "which needs a token with scope admin and a run folder that they can read. Default: a server is "
        "started on this machine.",
    )
    flags: list[str] = Field(
        default_factory=lambda: list(CPU),
        description="Flags of `opd serve` for the server that is started on this machine.",
    )
    security: dict[str, Any] = Field(
        default_factory=dict,
        description="TLS and credentials for the given endpoints: teachers.fleet.security of the fusion's recipe.",
    )


class OrbitRecipe(Settings):
    """A student with several thinking budgets: RL per mode, merge, fusion (arXiv 2601.08310)."""

    run: Path = Field(description="Folder in which all stages are run and kept.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all stages and of the merge.")
    model: ModelSettings = Field(description="The student model from which the first stage starts.")
    prompts: PromptSettings = Field(description="Source of the training and held-out prompts, the same for all stages.")
    modes: dict[str, ModeSettings] = Field(
        min_length=2, description="Modes (thinking budgets) by name, from the largest budget to the smallest."
    )
    rl: dict[str, Any] = Field(
        description="Keys of the recipes of the RL stages, one stage per mode: objective, rollout, train, eval and "
        "others."
    )
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Map from a mode to the keys of `rl` that differ in its stage; groups are merged key by key.",
    )
    merge: MergeRule = Field(
        default_factory=MergeRule,
        description="How the modes' teachers are merged into the student that the fusion starts from.",
    )
    fusion: dict[str, Any] = Field(
        description="Keys of the recipe of the fusion: objective, rollout, train, eval and others."
    )
    teachers: ServingSettings = Field(
        default_factory=ServingSettings, description="Where the modes' teachers are served during the fusion."
    )
    launch: list[str] = Field(
        default_factory=list,
        description="Command that starts a stage's processes instead of this Python, word by word, for example "
        "[torchrun, --nproc-per-node, '8'].",
    )

    @model_validator(mode="after")
    def _check(self) -> "OrbitRecipe":
        if self.model.lora is not None:
            raise ValueError("model.lora cannot be used with ORBIT, which merges whole models; remove it")
        names = list(self.modes)
        for wide, narrow in pairwise(names):
            if self.modes[narrow].budget >= self.modes[wide].budget:
                raise ValueError(
                    f"budgets must fall from mode to mode, but {narrow} has {self.modes[narrow].budget} after "
                    f"{self.modes[wide].budget} of {wide}; list modes from the largest budget to the smallest"
                )
        if len(self.trained) < 2:
            raise ValueError(
                "fewer than two modes have a weight above 0, so there is nothing to fuse; give two modes a weight"
            )
        for name, mode in self.modes.items():
            if not mode.weight and mode.teacher not in self.teacher_names.values():
                raise ValueError(
                    f"mode {name} has weight 0, so no stage trains its teacher {mode.teacher or name}; set its teacher "
                    f"to that of a trained mode: {', '.join(self.teacher_names.values())}"
                )
        for key, found in (("stages", self.stages), ("merge.weights", self.merge.weights)):
            unknown = sorted(found.keys() - self.trained)
            if unknown:
                raise ValueError(
                    f"{key} names {', '.join(unknown)}, but the trained modes are {', '.join(self.trained)}"
                )
        unserved = sorted(self.trained - self.teachers.endpoints.keys()) if self.teachers.endpoints else []
        if unserved:
            raise ValueError(f"teachers.endpoints lacks mode {', '.join(unserved)}; name its teacher's servers")
        return self

    @property
    def trained(self) -> KeysView[str]:
        """Names of the modes with a weight above 0, which have a stage and a teacher of their own, in order."""
        return {name: None for name, mode in self.modes.items() if mode.weight}.keys()

    @property
    def teacher_names(self) -> dict[str, str]:
        """The name that each trained mode's teacher is served under."""
        return {name: self.modes[name].teacher or name for name in self.trained}

    def stage_folder(self, stage: str) -> Path:
        """The run folder of a stage, or of the merged model."""
        return self.run / "stages" / stage


def rl_recipe(orbit: OrbitRecipe, mode: str, model: str) -> Recipe:
    """The recipe of a mode's RL stage, which starts from `model`, a folder or the base model's path.

    Unless the recipe names rewards, an answer that was cut by its budget earns no reward, whatever it contains.
    """
    keys = {"rewards": [{"name": "dler"}]} | _merged(orbit.rl, orbit.stages.get(mode, {}))
    return _recipe(orbit, mode, model, keys, {mode: orbit.modes[mode]})


def fusion_recipe(
    orbit: OrbitRecipe,
    model: str,
    endpoints: dict[str, list[str]] | list[str],
    taught: Mapping[str, float] | None = None,
) -> Recipe:
    """The recipe of the fusion: on-policy distillation in which the teacher of its own mode scores each row.

    Args:
        orbit: the whole recipe.
        model: folder of the merged student.
        endpoints: addresses of the teacher servers, in the form of `teachers.endpoints`.
        taught: accuracy of each mode's teacher within its budget, from which recoveries are computed. A value in the
            mode's own settings takes precedence.
    """
    teachers: dict[str, Any] = {"endpoints": endpoints}
    if orbit.teachers.security:
        teachers["fleet"] = {"security": orbit.teachers.security}
    modes = {
        name: mode if mode.teacher_accuracy is not None else mode.model_copy(update={"teacher_accuracy": accuracy})
        for name, mode in orbit.modes.items()
        for accuracy in [(taught or {}).get(name)]
    }
    ours = {"teachers": teachers, "eval": {"leakage": LEAKAGE}}
    return _recipe(orbit, FUSION, model, _merged(ours, orbit.fusion), modes)


def merge_settings(orbit: OrbitRecipe, models: dict[str, str]) -> MergeSettings:
    """The settings of the merge; `models` has the folder of each mode's teacher."""
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


def stage_hashes(orbit: OrbitRecipe) -> dict[str, str]:
    """SHA-256 of the settings that decide each stage's result, by stage in order.

    Run folders, the group `teachers` and the teachers' accuracies that the stages measure are left out. The order of
    keys in the recipe's file has no effect.
    """
    first, *_ = orbit.trained
    found: dict[str, Any] = {
        mode: rl_recipe(orbit, mode, orbit.model.path if mode == first else "<model>").model_dump(mode="json")
        for mode in orbit.trained
    }
    found[MERGE] = merge_settings(orbit, {mode: f"<{mode}>" for mode in orbit.trained}).model_dump(mode="json")
    found[FUSION] = fusion_recipe(orbit, "<model>", []).model_dump(mode="json")
    for settings in found.values():
        for key in ("run", "teachers"):
            settings.pop(key, None)
    texts = {stage: json.dumps(settings, sort_keys=True) for stage, settings in found.items()}
    return {stage: hashlib.sha256(text.encode()).hexdigest() for stage, text in texts.items()}


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
    """A copy of `one` with the keys of `other`, which take precedence; nested groups are merged key by key."""
    out = dict(one)
    for key, value in other.items():
        mine = out.get(key)
        out[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return out
