"""Accuracy of models and of finished runs on the held-out prompts: sampled as the recipe says, and greedy.

A method that sharpens the student's distribution gains accuracy of sampled answers and perhaps nothing else; the
greedy accuracy shows which.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import parse_settings
from student.evaluate_model import evaluate_model
from student.lab.experiment import ROUTED, Arm
from student.lab.plan import Plan
from student.lab.runs import Run, beside
from student.recipe import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Level:
    """What a model reaches on the prompts of one seed.

    Attributes:
        accuracy: of sampled answers.
        greedy: of greedy answers.
    """

    accuracy: float
    greedy: float


Levels = dict[str, dict[int, Level]]
"""Levels by model and seed."""


def grade_models(plan: Plan, say: Say) -> Levels:
    """Levels of the evaluated models and, with several teachers, of the prompts' own teachers; kept in files."""
    experiment = plan.experiment
    names = dict.fromkeys((*experiment.evaluated, *experiment.routes.values()))
    for name in [name for name in names if name != ROUTED]:
        for seed in plan.seeds:
            out = _model_file(plan, name, seed)
            if out.is_file():
                continue
            path = str(plan.cast.model(name).path)
            recipe = plan.recipe(Arm("models", ""), seed, plan.default_rate())
            found = {"sampled": _evaluate(recipe, path), "greedy": _evaluate(recipe, path, greedy=True)}
            _write(out, found)
            say(f"{name} on the prompts of seed {seed}: accuracy {found['sampled']['accuracy']:.3f}")
    return read_models(plan)


def grade_runs(plan: Plan, runs: Sequence[Run], say: Say) -> None:
    """Greedy accuracy of the last weights of finished runs, written beside their folders."""
    for run in runs:
        if run.done and read_greedy(run) is None:
            found = _evaluate(run.recipe, str(Path(run.summary()["checkpoint"]) / "model"), greedy=True)
            _write(beside(run.folder, ".greedy.json"), {"key": run.key, **found})
            say(f"{run.folder}: greedy accuracy {found['accuracy']:.3f}")


def read_greedy(run: Run) -> float | None:
    """Greedy accuracy of a finished run; None when it was not measured on this recipe."""
    path = beside(run.folder, ".greedy.json")
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return float(data["accuracy"]) if data.get("key") == run.key else None


def read_models(plan: Plan) -> Levels:
    """What `grade_models` found so far."""
    experiment = plan.experiment
    levels: Levels = {}
    for name in experiment.evaluated:
        if name == ROUTED:
            continue
        files = {seed: _model_file(plan, name, seed) for seed in plan.seeds}
        levels[name] = {seed: _level(json.loads(file.read_text())) for seed, file in files.items() if file.is_file()}
    if ROUTED in experiment.evaluated:
        levels[ROUTED] = _routed(plan)
    return levels


def _evaluate(recipe: Any, model: str, *, greedy: bool = False) -> dict[str, Any]:
    recipe = {**recipe, "run": "unused", "methods": [], "objective": [{"name": "opd", "payload": "sampled"}]}
    recipe["eval"] = {**recipe["eval"], "reverse_kl": False} | ({"temperature": 0.0} if greedy else {})
    return evaluate_model(parse_settings(Recipe, recipe, source=f"evaluation of {model}"), model)


def _level(data: dict[str, Any]) -> Level:
    return Level(float(data["sampled"]["accuracy"]), float(data["greedy"]["accuracy"]))


def _routed(plan: Plan) -> dict[int, Level]:
    """Each prompt answered by the teacher of its domain."""
    found = {}
    for seed in plan.seeds:
        files = {domain: _model_file(plan, name, seed) for domain, name in plan.experiment.routes.items()}
        if all(file.is_file() for file in files.values()):
            data = {domain: json.loads(file.read_text(encoding="utf-8")) for domain, file in files.items()}
            found[seed] = Level(*(_share(data, how) for how in ("sampled", "greedy")))
    return found


def _share(data: dict[str, Any], how: str) -> float:
    own = [data[domain][how]["domains"][domain] for domain in data]
    return float(sum(part["accuracy"] * part["prompts"] for part in own) / sum(part["prompts"] for part in own))


def _model_file(plan: Plan, name: str, seed: int) -> Path:
    return plan.folder / "levels" / f"{name}-{seed}.json"


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
