"""Premises of EffOPD: training moves the weights in a straight line, so that a step further along it is progress.

Two measurements:

    early   a training run of its own: its weights after a tenth of the steps are moved on in the same direction until
            they are as far from the start as the final ones, and the gain in accuracy is compared with the final gain
    line    for a teacher of the student's shape, accuracy along the straight line from the student to it and beyond
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd_lab.evaluate import measure_model
from opd_lab.experiment import TUNING_SEED, Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured
from opd_lab.runs import train_run
from opd_lab.world import served

PROMPTS = {"full": 512, "quick": 8}
"""Number of prompts, each answered once at temperature 1, by form."""
_WEIGHTS = "model.safetensors"


def early(plan: ExperimentPlan, world: int, *, arm: str, least: float) -> Measured:
    """Measure the share of the final gain that the weights after a tenth of the steps reach when they are moved on.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        arm: name of the arm whose recipe is trained, without methods and on the tuning seed.
        least: least share for the premise to be present.
    """
    experiment = plan.experiment
    models, replicate = plan.models[world], Replicate(world, TUNING_SEED)
    chosen = experiment.arm(arm)
    with served(models, experiment.served, plan.world_folder(world) / "premise") as addresses:
        here = replace(plan, addresses=addresses)
        rate = plan.rates(chosen)[0]
        steps = int(here.recipe(chosen, replicate, rate)["train"]["steps"])
        tenth = max(1, steps // 10)
        kept = {"train.checkpoint_every": tenth, "train.keep_checkpoints": steps // tenth + 1}
        scout = Arm("premise", "", {**chosen.overrides, "methods": [], **kept})
        run = train_run(here.run(scout, replicate, rate))
    start = load_file(models.model(experiment.student).path / _WEIGHTS)
    begun = min(run.folder.glob("checkpoints/step-*/model"), key=lambda path: path.parent.name)
    moved, final = _less(load_file(begun / _WEIGHTS), start), _less(load_file(run.model / _WEIGHTS), start)
    factor = _length(final) / _length(moved)
    straight = sum(float((moved[name] * final[name]).sum()) for name in moved) / (_length(moved) * _length(final))
    recipe = plan.recipe(scout, replicate, rate)
    accuracy = {
        name: _accuracy(plan, recipe, run.model, weights)
        for name, weights in (
            ("start", start),
            ("tenth", _plus(start, moved, 1.0)),
            ("rescaled", _plus(start, moved, factor)),
            ("end", _plus(start, final, 1.0)),
        )
    }
    gain = accuracy["end"] - accuracy["start"]
    share = (accuracy["rescaled"] - accuracy["start"]) / gain if gain else float("nan")
    numbers = (
        f"accuracy {accuracy['start']:.3f} at the start, {accuracy['tenth']:.3f} after a tenth of the steps, "
        f"{accuracy['rescaled']:.3f} when that is moved on {factor:.1f} times as far, {accuracy['end']:.3f} at the "
        f"end: {share:.0%} of the gain; cosine of the two displacements {straight:.2f}"
    )
    return Measured(share >= least, numbers)


def line(plan: ExperimentPlan, world: int, *, teacher: str, places: Sequence[float], loss: float) -> Measured:
    """Measure accuracy at places of the line from the student (0) to its teacher (1) and beyond.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        teacher: name of the teacher in the world; the premise is absent if it has another shape than the student.
        places: places to measure at, which include 1.
        loss: largest loss of accuracy, from 1 to the first place beyond, for the premise to be present.
    """
    models, experiment = plan.models[world], plan.experiment
    data = plan.recipe(Arm("premise", ""), Replicate(world, experiment.seeds[0]), plan.default_rate())
    student, end = models.model(experiment.student).path, models.model(teacher).path
    start, goal = load_file(student / _WEIGHTS), load_file(end / _WEIGHTS)
    if {name: tensor.shape for name, tensor in start.items()} != {name: tensor.shape for name, tensor in goal.items()}:
        return Measured(False, f"{teacher} has another shape than the student: there is no straight line between them")
    way = _less(goal, start)
    found = {place: _accuracy(plan, data, student, _plus(start, way, place)) for place in places}
    beyond = min((place for place in places if place > 1), default=1.0)
    apart = _length(way) / _length(start)
    said = ", ".join(f"{place:g}: {accuracy:.3f}" for place, accuracy in found.items())
    return Measured(
        found[beyond] >= found[1.0] - loss, f"accuracy at {said}; the two are {apart:.1%} of a length apart"
    )


def _accuracy(plan: ExperimentPlan, recipe: Mapping[str, Any], like: Path, weights: Mapping[str, Tensor]) -> float:
    """Accuracy at temperature 1 of the model in the folder `like` with its weights replaced by `weights`."""
    with TemporaryDirectory() as scratch:
        folder = shutil.copytree(like, Path(scratch) / "model", ignore=shutil.ignore_patterns(_WEIGHTS))
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / _WEIGHTS, {"format": "pt"})
        settings = {"samples": 1, "prompts": PROMPTS[plan.form], "temperature": 1.0}
        return float(measure_model(recipe, folder, settings)["accuracy"])


def _less(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name].double() - other[name].double() for name in other}


def _plus(start: Mapping[str, Tensor], way: Mapping[str, Tensor], times: float) -> dict[str, Tensor]:
    return {name: (start[name].double() + times * way[name]).to(start[name].dtype) for name in start}


def _length(way: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, computed in float64."""
    return float(torch.stack([tensor.double().pow(2).sum() for tensor in way.values()]).sum().sqrt())
