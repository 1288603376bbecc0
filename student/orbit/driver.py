"""The stages of ORBIT, one after the other: reinforcement per mode, merge, fusion.

    theta_K = RL(base, mode K, widest budget);  T_K = theta_K
    theta_k = RL(theta_{k+1}, mode k, next budget);  T_k = theta_k
    S = merge(T_1 ... T_K)
    S <- on-policy distillation: a row in mode k is sampled within budget k and scored by T_k alone

Every stage is an ordinary student job: its recipe stands in stages/NAME.yaml and `opd train` runs it alone. A stage
runs in a process of its own, so that its memory is free before the next one and a crash is its alone; whatever stops
it, the same command with --resume goes on where it stood. Source: arXiv 2601.08310 (abstract and reviews; no code was
published: budgets, merge weights and the fusion's rates are ours).
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from opd.errors import CancelledError, StageError
from student.orbit.merge import merge
from student.orbit.recipe import FUSION, MERGE, OrbitRecipe, fusion_recipe, merge_settings, rl_recipe
from student.orbit.state import State
from student.recipe import Recipe
from student.run.local_server import served

Say = Callable[[str], None]


def run_orbit(orbit: OrbitRecipe, *, resume: bool, say: Say) -> State:
    """Run what is left of all stages.

    Args:
        orbit: the recipe.
        resume: go on with a run that was stopped.
        say: tells a person what happens.

    Raises:
        RunFolderError: when the folder is in use, or follows another recipe.
        StageError: when a stage's process fails, with its exit code.
        CancelledError: after Ctrl-C or SIGTERM; the stage has saved its state.
    """
    text = yaml.safe_dump(orbit.model_dump(mode="json"), sort_keys=False)
    state = State.open(orbit.run, hashlib.sha256(text.encode()).hexdigest(), resume=resume)
    state.save()
    (orbit.run / "orbit.yaml").write_text(text, encoding="utf-8")
    model = orbit.model.path
    for mode in orbit.modes:
        model = _train(orbit, state, mode, partial(rl_recipe, orbit, mode, model), say)
    if MERGE not in state.checkpoints:
        state.running = MERGE
        state.save()
        folder = orbit.stage_folder(MERGE)
        if not folder.exists():
            merge(merge_settings(orbit, {mode: state.checkpoints[mode] for mode in orbit.modes}), folder)
        _done(state, MERGE, folder)
        say(f"merged the teachers of {len(orbit.modes)} modes by {orbit.merge.method} into {folder}")
    if FUSION not in state.checkpoints:
        with _teachers(orbit, state, say) as endpoints:
            merged = state.checkpoints[MERGE]
            _train(orbit, state, FUSION, partial(fusion_recipe, orbit, merged, endpoints), say)
    return state


def _train(orbit: OrbitRecipe, state: State, stage: str, make: Callable[[], Recipe], say: Say) -> str:
    """Run a stage's job unless it is done; returns the folder of its last model."""
    if stage in state.checkpoints:
        return state.checkpoints[stage]
    recipe = make()
    path = orbit.run / "stages" / f"{stage}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    state.running = stage
    state.save()
    summary = recipe.run / "summary.json"
    if not summary.exists():
        begun = recipe.run.exists() and any(recipe.run.iterdir())
        say(f"stage {stage}: {'continuing' if begun else 'starting'} {path}")
        _call(orbit, stage, [str(path), *(["--resume"] if begun else [])])
    found = json.loads(summary.read_text(encoding="utf-8"))
    warning = _no_progress(stage, recipe.run, found)
    if warning:
        state.warnings[stage] = warning
        say(f"warning: {warning}")
    _done(state, stage, Path(found["checkpoint"]) / "model")
    return state.checkpoints[stage]


def _call(orbit: OrbitRecipe, stage: str, arguments: list[str]) -> None:
    process = subprocess.Popen([*(orbit.launch or [sys.executable]), "-m", "opd.cli", "train", *arguments])
    try:
        code = process.wait()
    except (KeyboardInterrupt, CancelledError):
        process.terminate()  # Ctrl-C reaches the stage by itself, a SIGTERM to this process does not
        process.wait()
        raise CancelledError(f"stopped in stage {stage}; continue with --resume.") from None
    if code == CancelledError.exit_code:
        raise CancelledError(f"stopped in stage {stage}; continue with --resume.")
    if code:
        raise StageError(
            f"stage {stage} ended with exit code {code}, see above; mend the cause and continue with --resume."
        )


def _done(state: State, stage: str, model: Path) -> None:
    state.checkpoints[stage] = str(model)
    state.running = ""
    state.save()


def _no_progress(stage: str, folder: Path, summary: dict[str, Any]) -> str | None:
    """The sentence for a reinforcement stage after which the student is not better than before it."""
    before, after = ((summary.get(name) or {}).get("accuracy") for name in ("before", "after"))
    if stage == FUSION or before is None or after is None or after > before:
        return None
    curve = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "eval/accuracy" in record:
            curve.append(f"{record['eval/accuracy']:.3f} at step {record['step']}")
    shown = ", ".join([f"{before:.3f} before", *curve, f"{after:.3f} after"])
    return f"stage {stage} made no progress within its budget: accuracy {shown}; its teacher has nothing to teach."


@contextmanager
def _teachers(orbit: OrbitRecipe, state: State, say: Say) -> Iterator[dict[str, list[str]] | list[str]]:
    """The modes' teachers, served: on this machine, or on the given servers with their weights pushed."""
    names = orbit.teacher_names
    models = {names[mode]: state.checkpoints[mode] for mode in orbit.modes}
    if not orbit.teachers.endpoints:
        with served(models, orbit.run / "server", orbit.teachers.flags) as address:
            say(f"serving the teachers {', '.join(models)} at {address}")
            yield [address]
        return
    from opd.config import parse_settings
    from opd.fleet.client import TeacherFleet
    from opd.fleet.settings import FleetSettings

    settings = parse_settings(FleetSettings, {"security": orbit.teachers.security} if orbit.teachers.security else {})
    endpoints = {names[mode]: list(places) for mode, places in orbit.teachers.endpoints.items()}
    with TeacherFleet.connect(endpoints, settings=settings) as fleet:
        for mode in orbit.modes:
            folder = state.checkpoints[mode]
            update = fleet.update_weights(names[mode], folder)
            state.teachers[mode] = folder
            if update.failures:
                state.warnings[f"teacher {mode}"] = update.sentence()
            state.save()
            say(f"pushed {folder}: {update.sentence()}")
    yield endpoints
