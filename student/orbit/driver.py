"""Runs the stages of ORBIT one after the other: RL for each mode, merge, fusion.

    theta_K = RL(base, mode K, largest budget); T_K = theta_K
    theta_k = RL(theta_{k+1}, mode k, next budget);  T_k = theta_k
    S = merge(T_1 ... T_K)
    S <- on-policy distillation: a row in mode k is sampled within budget k and scored by T_k alone

RL and fusion are ordinary student jobs: their recipes are in stages/NAME.yaml, and `opd train` can run each by itself.
Each runs in its own process, so that its memory is free before the next one starts and a crash affects no other.
Whatever stops a stage, the same command with --resume continues from there.

Source: arXiv 2601.08310 (abstract and reviews; no code was published, so budgets, merge weights and the fusion's rates
are our own choice).
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
from opd.files import write_whole
from student.orbit.merge import merge
from student.orbit.plot import plot_modes
from student.orbit.process import StageProcesses
from student.orbit.recipe import FUSION, MERGE, OrbitRecipe, fusion_recipe, merge_settings, rl_recipe, stage_hashes
from student.orbit.state import State
from student.run.local_server import served
from student.settings.recipe import Recipe

Log = Callable[[str], None]
QUARTERS = 4


def run_orbit(orbit: OrbitRecipe, *, resume: bool, log: Log) -> State:
    """Run all stages that are not done yet, and return the final state.

    Args:
        orbit: the recipe.
        resume: continue a run that was stopped.
        log: called with each line for the console.

    Raises:
        RunFolderError: when the folder is in use, or a stage that is done there had other settings.
        StageError: when a stage's process fails; the message has its exit code.
        CancelledError: after Ctrl-C, SIGTERM or SIGHUP, once the running stage has saved its state.
    """
    hashes = stage_hashes(orbit)
    with StageProcesses(orbit.run) as stages:
        state = State.open(orbit.run, hashes, resume=resume)
        # Only settings of stages that are not done can differ here: `open` has refused other changes.
        state.settings = hashes
        state.save()
        write_whole(orbit.run / "orbit.yaml", write_yaml(orbit.model_dump(mode="json")))
        try:
            _run(orbit, state, stages, log)
        except CancelledError:
            where = f" in stage {state.running}" if state.running else ""
            raise CancelledError(f"stopped{where}; continue with --resume.") from None
    return state


def _run(orbit: OrbitRecipe, state: State, stages: StageProcesses, log: Log) -> None:
    """Run the stages that are not done yet, in order; each starts from the model of the one before."""
    model = orbit.model.path
    for mode in orbit.trained:
        model = _train(orbit, state, stages, mode, partial(rl_recipe, orbit, mode, model), log)
    if MERGE not in state.checkpoints:
        state.running = MERGE
        state.save()
        folder = orbit.stage_folder(MERGE)
        if not folder.exists():  # it exists if the command was killed after the merge but before the state was saved
            merge(merge_settings(orbit, {mode: state.checkpoints[mode] for mode in orbit.trained}), folder)
        _done(state, MERGE, folder)
        log(f"merged the teachers of {len(orbit.trained)} modes into {folder} with rule {orbit.merge.method}")
    if FUSION not in state.checkpoints:
        state.running = FUSION
        state.save()
        with teachers(orbit, state, log) as endpoints:
            merged, taught = state.checkpoints[MERGE], _teacher_accuracy(orbit)
            _train(orbit, state, stages, FUSION, partial(fusion_recipe, orbit, merged, endpoints, taught), log)
    folders = {mode: orbit.stage_folder(mode) for mode in orbit.trained}
    plot_modes(list(orbit.modes), folders, orbit.stage_folder(FUSION), orbit.run / "modes.svg")


def _teacher_accuracy(orbit: OrbitRecipe) -> dict[str, float]:
    """Accuracy of each mode's teacher within its budget, for the modes whose stage evaluated it after training."""
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
    write_whole(path, write_yaml(recipe.model_dump(mode="json")))
    state.running = stage
    state.save()
    # A job writes summary.json last, so the stage is done if it exists, even if this command was killed before it could
    # save that.
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
            f"stage {stage} failed with exit code {code}, see its message above; fix the cause and continue with "
            "--resume."
        )


def _done(state: State, stage: str, model: Path) -> None:
    state.checkpoints[stage] = str(model)
    state.running = ""
    state.save()


def no_progress(stage: str, folder: Path, summary: dict[str, Any]) -> str | None:
    """A warning with the learning curve if a stage has not made the student better; None if it has.

    Better means a higher accuracy after the stage than before it, or, without evaluations, a higher mean reward in the
    last quarter of the steps than in the first. Fewer than four steps with rewards are not judged.

    Args:
        stage: name of the stage.
        folder: its run folder.
        summary: contents of its summary.json.
    """
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    before, after = ((summary.get(name) or {}).get("accuracy") for name in ("before", "after"))
    if before is not None and after is not None:
        evaluated = [record for record in records if "eval/accuracy" in record and record["step"]]
        points = [f"{record['eval/accuracy']:.3f} at step {record['step']}" for record in evaluated]
        shown = ", ".join([f"accuracy {before:.3f} before", *points, f"{after:.3f} after"])
    else:  # without evaluations, judge by the rewards of training
        rewards = [float(record["reward"]) for record in records if "reward" in record]
        parts = [part for part in np.array_split(rewards, QUARTERS) if len(part)]
        before, after = (float(parts[0].mean()), float(parts[-1].mean())) if len(parts) == QUARTERS else (0.0, 1.0)
        shown = "reward by quarter of the steps " + ", ".join(f"{part.mean():.3f}" for part in parts)
    if after > before:
        return None
    what = (
        "the student is not better than the merge"
        if stage == FUSION
        else "this mode's teacher is no better than the model it started from"
    )
    return f"stage {stage} made no progress within its budget: {shown}; {what}."


@contextmanager
def teachers(orbit: OrbitRecipe, state: State, log: Log) -> Iterator[dict[str, list[str]] | list[str]]:
    """Serve the modes' teachers while the context is open; gives `teachers.endpoints` for the fusion's recipe.

    Servers are started on this machine, or, if the recipe names endpoints, the weights are pushed to these.
    """
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
            # Saved after each push: a run killed between two pushes still knows which weights each server holds.
            state.save()
            log(f"pushed {folder}: {update.sentence()}")
    yield endpoints
