"""The stages of ORBIT, one after the other: RL per mode, merge, fusion.

    theta_K = RL(base, mode K, largest budget); T_K = theta_K
    theta_k = RL(theta_{k+1}, mode k, next budget);  T_k = theta_k
    S = merge(T_1 ... T_K)
    S <- on-policy distillation: a row in mode k is sampled within budget k and scored by T_k alone

Every stage is an ordinary student job: its recipe is in stages/NAME.yaml, and `opd train` can run it by itself. A stage
runs in a process of its own, so that its memory is free before the next one and a crash affects no other; whatever
stops it, the same command with --resume continues from there. Source: arXiv 2601.08310 (abstract and reviews; no code
was published: budgets, merge weights and the fusion's rates are ours).
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from opd.config.text import write_yaml
from opd.errors import CancelledError, StageError
from student.orbit.merge import merge
from student.orbit.plot import plot_modes
from student.orbit.process import StageProcesses
from student.orbit.recipe import FUSION, MERGE, OrbitRecipe, fusion_recipe, merge_settings, rl_recipe, stage_hashes
from student.orbit.state import State
from student.recipe import Recipe
from student.run.local_server import served

Log = Callable[[str], None]
QUARTERS = 4


def run_orbit(orbit: OrbitRecipe, *, resume: bool, log: Log) -> State:
    """Run what is left of all stages.

    Args:
        orbit: the recipe.
        resume: continue a run that was stopped.
        log: takes lines for the console.

    Raises:
        RunFolderError: when the folder is in use, or what is done there followed another recipe.
        StageError: when a stage's process fails, with its exit code.
        CancelledError: after Ctrl-C or SIGTERM; the stage has saved its state.
    """
    hashes = stage_hashes(orbit)
    with StageProcesses(orbit.run) as stages:
        state = State.open(orbit.run, hashes, resume=resume)
        # Settings of stages that are not done may have changed; `open` has refused changes of those that are.
        state.settings = hashes
        state.save()
        text = write_yaml(orbit.model_dump(mode="json"))
        (orbit.run / "orbit.yaml").write_text(text, encoding="utf-8")
        try:
            _run(orbit, state, stages, log)
        except CancelledError:
            where = f" in stage {state.running}" if state.running else ""
            raise CancelledError(f"stopped{where}; continue with --resume.") from None
    return state


def _run(orbit: OrbitRecipe, state: State, stages: StageProcesses, log: Log) -> None:
    """Run what is left of all stages, in order: each starts from the model of the one before."""
    model = orbit.model.path
    for mode in orbit.trained:
        model = _train(orbit, state, stages, mode, partial(rl_recipe, orbit, mode, model), log)
    if MERGE not in state.checkpoints:
        state.running = MERGE
        state.save()
        folder = orbit.stage_folder(MERGE)
        if not folder.exists():  # it does where the command was killed between the merge and the note of it
            merge(merge_settings(orbit, {mode: state.checkpoints[mode] for mode in orbit.trained}), folder)
        _done(state, MERGE, folder)
        log(f"merged the teachers of {len(orbit.trained)} modes by {orbit.merge.method} into {folder}")
    if FUSION not in state.checkpoints:
        state.running = FUSION
        state.save()
        with teachers(orbit, state, log) as endpoints:
            merged, taught = state.checkpoints[MERGE], _teacher_accuracy(orbit)
            _train(orbit, state, stages, FUSION, partial(fusion_recipe, orbit, merged, endpoints, taught), log)
    folders = {mode: orbit.stage_folder(mode) for mode in orbit.trained}
    plot_modes(list(orbit.modes), folders, orbit.stage_folder(FUSION), orbit.run / "modes.png")


def _teacher_accuracy(orbit: OrbitRecipe) -> dict[str, float]:
    """Accuracy of each mode's teacher within its budget, where its stage has evaluated it."""
    found = {}
    for mode in orbit.trained:
        path = orbit.stage_folder(mode) / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        accuracy = (summary.get("after") or {}).get("accuracy")
        if accuracy is not None:
            found[mode] = accuracy
    return found


def _train(
    orbit: OrbitRecipe, state: State, stages: StageProcesses, stage: str, make: Callable[[], Recipe], log: Log
) -> str:
    """Run a stage's job unless it is done; returns the folder of its last model."""
    if stage in state.checkpoints:
        return state.checkpoints[stage]
    recipe = make()
    path = orbit.run / "stages" / f"{stage}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_yaml(recipe.model_dump(mode="json")), encoding="utf-8")
    state.running = stage
    state.save()
    # summary.json is the last thing that a job writes: with it the stage is done, also if this command was killed then.
    summary = recipe.run / "summary.json"
    if not summary.exists():
        begun = (recipe.run / "recipe.yaml").exists()
        log(f"stage {stage}: {'continuing' if begun else 'starting'} {path}")
        _call(orbit, stages, stage, [str(path), *(["--resume"] if begun else [])])
    found = json.loads(summary.read_text(encoding="utf-8"))
    warning = no_progress(stage, recipe.run, found)
    if warning:
        state.warnings[stage] = warning
        log(f"warning: {warning}")
    _done(state, stage, Path(found["checkpoint"]) / "model")
    return state.checkpoints[stage]


def _call(orbit: OrbitRecipe, stages: StageProcesses, stage: str, arguments: list[str]) -> None:
    code = stages.run([*(orbit.launch or [sys.executable]), "-m", "opd.cli", "train", *arguments])
    if code == CancelledError.exit_code:
        raise CancelledError(f"stage {stage} was stopped")
    if code:
        raise StageError(
            f"stage {stage} ended with exit code {code}, see above; fix the cause and continue with --resume."
        )


def _done(state: State, stage: str, model: Path) -> None:
    state.checkpoints[stage] = str(model)
    state.running = ""
    state.save()


def no_progress(stage: str, folder: Path, summary: dict[str, Any]) -> str | None:
    """A warning, with the curve, for a stage after which the student is no better than before it; None where it is.

    Args:
        stage: its name.
        folder: its run folder.
        summary: its summary.json.
    """
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    before, after = ((summary.get(name) or {}).get("accuracy") for name in ("before", "after"))
    if before is not None and after is not None:
        evaluated = [record for record in records if "eval/accuracy" in record]
        points = [f"{record['eval/accuracy']:.3f} at step {record['step']}" for record in evaluated]
        shown = ", ".join([f"accuracy {before:.3f} before", *points, f"{after:.3f} after"])
    else:  # without evaluations, by the rewards of training
        rewards = [float(record["reward"]) for record in records if "reward" in record]
        parts = [part for part in np.array_split(rewards, QUARTERS) if len(part)]
        before, after = (float(parts[0].mean()), float(parts[-1].mean())) if len(parts) == QUARTERS else (0.0, 1.0)
        shown = "reward by quarter of the steps " + ", ".join(f"{part.mean():.3f}" for part in parts)
    if after > before:
        return None
    what = "the student is not better than the merge" if stage == FUSION else "its teacher has nothing to teach"
    return f"stage {stage} made no progress within its budget: {shown}; {what}."


@contextmanager
def teachers(orbit: OrbitRecipe, state: State, log: Log) -> Iterator[dict[str, list[str]] | list[str]]:
    """The modes' teachers, served: on this machine, or on the given servers with their weights pushed."""
    names = orbit.teacher_names
    models = {names[mode]: state.checkpoints[mode] for mode in orbit.trained}
    if not orbit.teachers.endpoints:
        with served(models, orbit.run / "server", orbit.teachers.flags) as address:
            state.teachers = {mode: state.checkpoints[mode] for mode in orbit.trained}
            state.servers = {mode: [address] for mode in orbit.trained}
            state.save()
            log(f"serving the teachers {', '.join(models)} at {address}")
            yield [address]
        return
    from opd.config import parse_settings
    from opd.fleet.client import TeacherFleet
    from opd.fleet.settings import FleetSettings

    settings = parse_settings(FleetSettings, {"security": orbit.teachers.security} if orbit.teachers.security else {})
    endpoints = {names[mode]: list(places) for mode, places in orbit.teachers.endpoints.items()}
    with TeacherFleet.connect(endpoints, settings=settings) as fleet:
        for mode in orbit.trained:
            folder = state.checkpoints[mode]
            update = fleet.update_weights(names[mode], folder)
            state.teachers[mode], state.servers[mode] = folder, endpoints[names[mode]]
            if update.failures:
                state.warnings[f"teacher {mode}"] = update.sentence()
            # After each push: a run that is killed between two says which servers hold which weights.
            state.save()
            log(f"pushed {folder}: {update.sentence()}")
    yield endpoints
