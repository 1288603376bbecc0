"""Measures models and finished runs on the held-out prompts: sampled accuracy, greedy accuracy and pass@k.

A method that sharpens the student raises the accuracy of sampled answers, and perhaps nothing else. Greedy accuracy
shows that, and pass@64 shows what was lost (arXiv 2608.11829: distillation may raise the mean and lower pass@k).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opd.config import parse_settings
from opd.files import write_whole
from opd.tasks.modes import ModeSettings
from opd_lab.experiment import OF_DOMAIN, OF_MODE, ROUTED, Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.runs import Run, beside, content_key, lasting, read_json
from student.commands.evaluate_model import evaluate_model
from student.data.mode_figures import OWN, across_modes
from student.settings.recipe import Recipe

SAMPLES, WIDE_SAMPLES = 8, 64
"""Answers per prompt at temperature 1: for the accuracy, and for pass@64, which uses a share of the prompts."""
_WIDE_SHARE = 4


@dataclass(frozen=True, slots=True)
class Level:
    """What a model reaches on the held-out prompts of one replicate. Figures that were not measured are nan.

    Attributes:
        accuracy: accuracy of answers sampled at temperature 1, which is pass@1.
        greedy: accuracy of greedy answers.
        pass8: pass@8 at temperature 1.
        pass64: pass@64 at temperature 1, on a quarter of the prompts; not measured for episodes.
        modes: figures of modes by name, from the answers at temperature 1; see `student.data.mode_figures`.
        domains: accuracy by domain, from the answers at temperature 1.
    """

    accuracy: float
    greedy: float = math.nan
    pass8: float = math.nan
    pass64: float = math.nan
    modes: Mapping[str, float] = field(default_factory=dict)
    domains: Mapping[str, float] = field(default_factory=dict)

    def get(self, measure: str) -> float:
        """The value of a claim's measure: a field, "mode/FIGURE" or "domain/NAME"; nan if not known."""
        if measure.startswith(OF_DOMAIN):
            return float(self.domains.get(measure.removeprefix(OF_DOMAIN), math.nan))
        if measure.startswith(OF_MODE):
            return float(self.modes.get(measure.removeprefix(OF_MODE), math.nan))
        return float(getattr(self, measure))


Levels = dict[str, dict[Replicate, Level]]
"""Levels by name of the model, and by replicate."""


@dataclass(frozen=True, slots=True)
class ModelGrade:
    """The task of measuring a model of the world on the prompts of a replicate.

    Attributes:
        name: name of the model in the experiment.
        replicate: the replicate that gives the prompts.
        file: output file.
        recipe: recipe that gives prompts and limits.
        model: folder of the weights.
    """

    name: str
    replicate: Replicate
    file: Path
    recipe: Mapping[str, Any]
    model: Path


def grades(plan: ExperimentPlan, world: int) -> list[ModelGrade]:
    """The tasks that are left for the models of a world: those the experiment evaluates, and the domains' teachers."""
    experiment = plan.experiment
    names = dict.fromkeys((*experiment.evaluated, *experiment.routes.values()))
    found = []
    for name in [name for name in names if name != ROUTED]:
        for replicate in [replicate for replicate in plan.replicates if replicate.world == world]:
            file = _model_file(plan, name, replicate)
            if not file.is_file():
                model = plan.models[world].model(name).path
                found.append(ModelGrade(name, replicate, file, _model_recipe(plan, replicate), model))
    return found


def grade_model(grade: ModelGrade) -> None:
    """Measure a model and write its figures to the task's file."""
    _write(grade.file, _measure(grade.recipe, grade.model))


def grade_run(run: Run) -> None:
    """Measure the last weights of a finished run and write the figures next to its folder, unless that was done."""
    if read_level(run) is None:
        _write(beside(run.folder, ".level.json"), _measure(run.recipe, run.model))


def read_level(run: Run) -> Level | None:
    """The level of the last weights of a run; None if it was not measured yet."""
    path = beside(run.folder, ".level.json")
    return _level(read_json(path, "remove it and run the arm again")) if path.is_file() else None


def read_models(plan: ExperimentPlan) -> Levels:
    """Read the levels of the experiment's evaluated models, as far as they were measured."""
    experiment = plan.experiment
    levels: Levels = {}
    for name in experiment.evaluated:
        if name == ROUTED:
            continue
        files = {replicate: _model_file(plan, name, replicate) for replicate in plan.replicates}
        levels[name] = {r: _level(read_json(file, "remove it")) for r, file in files.items() if file.is_file()}
    if ROUTED in experiment.evaluated:
        levels[ROUTED] = _routed(plan)
    return levels


def _measure(recipe: Mapping[str, Any], model: Path) -> dict[str, Any]:
    prompts = int(recipe["eval"]["prompts"])
    found = {
        "sampled": measure_model(recipe, model, {"samples": SAMPLES}),
        "greedy": measure_model(recipe, model, {"temperature": 0.0, "samples": 1}),
    }
    if "episodes" in recipe["rollout"]:  # pass@64 is expensive there, and 64 attempts open a lock by chance
        return found
    wide = {"samples": WIDE_SAMPLES, "prompts": max(1, prompts // _WIDE_SHARE)}
    return {**found, "wide": measure_model(recipe, model, wide)}


def measure_model(
    recipe: Mapping[str, Any], model: Path, settings: Mapping[str, Any], *, keep: bool = False
) -> dict[str, Any]:
    """Evaluate a model without teachers.

    Args:
        recipe: recipe of a run.
        model: folder of the weights.
        settings: keys that replace those of the recipe's `eval` group.
        keep: see `evaluate_model`, whose report is returned.
    """
    data = {
        **recipe,
        "run": "unused",
        "methods": [],
        "rewards": [],
        "objective": [{"name": "opd", "payload": "sampled"}],
    }
    data["eval"] = {**data["eval"], "reverse_kl": False, **settings}
    return evaluate_model(parse_settings(Recipe, data, source=f"evaluation of {model}"), str(model), keep=keep)


def _level(data: Mapping[str, Any]) -> Level:
    def passes(how: str, k: int) -> float:
        return float(data[how]["pass_at"].get(str(k), [math.nan])[0]) if how in data else math.nan

    return Level(
        float(data["sampled"]["accuracy"]),
        float(data["greedy"]["accuracy"]),
        passes("sampled", SAMPLES),
        passes("wide", WIDE_SAMPLES),
        data["sampled"]["modes"],
        {name: float(part["accuracy"]) for name, part in data["sampled"]["domains"].items()},
    )


def _routed(plan: ExperimentPlan) -> dict[Replicate, Level]:
    """The level when the teacher of its domain answers each prompt; without pass@k, which is not known by domain."""
    found = {}
    for replicate in plan.replicates:
        files = {domain: _model_file(plan, name, replicate) for domain, name in plan.experiment.routes.items()}
        if all(file.is_file() for file in files.values()):
            data = {domain: json.loads(file.read_text(encoding="utf-8")) for domain, file in files.items()}
            modes = _own_modes(plan, {domain: one["sampled"]["modes"] for domain, one in data.items()})
            own = {domain: float(one["sampled"]["domains"][domain]["accuracy"]) for domain, one in data.items()}
            found[replicate] = Level(_share(data, "sampled"), _share(data, "greedy"), modes=modes, domains=own)
    return found


def _own_modes(plan: ExperimentPlan, figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of modes when each teacher answers in its own mode; empty without modes."""
    modes = {name: ModeSettings(**mode) for name, mode in plan.experiment.recipe.get("modes", {}).items()}
    names = [(mode, f"{figure}/{mode}") for mode in figures for figure in OWN]
    own = {key: figures[mode][key] for mode, key in names if key in figures[mode]}
    return own | across_modes(own, modes) if modes else {}


def _share(data: Mapping[str, Any], how: str) -> float:
    own = [data[domain][how]["domains"][domain] for domain in data]
    return float(sum(part["accuracy"] * part["prompts"] for part in own) / sum(part["prompts"] for part in own))


def _model_file(plan: ExperimentPlan, name: str, replicate: Replicate) -> Path:
    # The name depends on prompts, limits and numbers of samples too, so that a model is always measured like the arms.
    parts = [lasting(_model_recipe(plan, replicate)), SAMPLES, WIDE_SAMPLES, plan.models[replicate.world].world.key]
    key = content_key(plan.root, parts)[:8]
    return plan.world_folder(replicate.world) / "levels" / f"{name}-{replicate.seed}-{key}.json"


def _model_recipe(plan: ExperimentPlan, replicate: Replicate) -> dict[str, Any]:
    return plan.recipe(Arm("models", ""), replicate, plan.default_rate())


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1) + "\n")


def as_json(levels: Mapping[Replicate, Level]) -> dict[str, dict[str, float]]:
    """Levels as JSON values, by name of their replicate."""
    return {replicate.name: asdict(level) for replicate, level in levels.items()}
