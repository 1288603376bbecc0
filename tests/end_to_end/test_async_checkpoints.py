"""`train.async_checkpoints`: the checkpoints of a run that waits for them, written while it goes on."""

import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from run_records import metrics_of

import student.job.saving as saving
from student.job.session import train
from student.learning.learner import Learner
from student.report.telemetry import Telemetry
from student.run.checkpoint import find_damage, latest_checkpoint, list_checkpoints
from student.settings.recipe import Recipe
from student.state.state_io import load_state

pytestmark = pytest.mark.slow

# The second checkpoint is cut off in the middle: some is on the disk, one file half, and the loop within a later step.
KILLED = """
import os, signal, sys, threading
from dataclasses import replace
import yaml
import student.job.saving as saving
from opd.config import parse_settings
from student.learning.learner import Learner
from student.job.session import train
from student.settings.recipe import Recipe

halfway, update, save, updates = threading.Event(), Learner.update, saving.save_checkpoint, []

def cut(root, step, parts, **options):
    assert threading.current_thread() is not threading.main_thread()
    def write(folder):
        (file := part.write(folder)[0]).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        halfway.set()
        threading.Event().wait()
    if step == 2:
        part = parts[-2]
        parts = [*parts[:-2], replace(part, write=write), parts[-1]]
    return save(root, step, parts, **options)

def updating(self, *arguments):
    updates.append(1)
    if len(updates) == 3:
        assert halfway.wait(600)
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *arguments)

saving.save_checkpoint, Learner.update = cut, updating
train(parse_settings(Recipe, yaml.safe_load(open(sys.argv[1]))))
"""
SMALL: dict[str, Any] = {"rollout": {"prompts_per_step": 2}, "eval": {"prompts": 0}}


def same_checkpoints(mine: Path, theirs: Path, hashes: Callable[[Path], dict[str, str]]) -> None:
    """Both whole, with equal weights and moments."""
    assert find_damage(mine) is None and find_damage(theirs) is None
    found, wanted = hashes(mine), hashes(theirs)
    # The order of torch's notes in the head of a file of shards is not fixed.
    assert found.keys() == wanted.keys() and all("-shards/" in n for n in found if found[n] != wanted[n])
    moments = [load_state(checkpoint / "trainer", "learner")["moments"] for checkpoint in (mine, theirs)]
    assert moments[0].keys() == moments[1].keys() and len(moments[0]) > 5
    for name, values in moments[0].items():
        assert all(torch.equal(value, moments[1][name][key]) for key, value in values.items()), name


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_checkpoints_written_beside_training_are_those_of_a_run_that_waits(
    make_recipe: Callable[..., Recipe],
    hashes: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sharding: str,
) -> None:
    common = {"steps": 3, "sharding": sharding}
    waiting = make_recipe(run=str(tmp_path / "waiting"), **SMALL, train=common)
    beside = make_recipe(run=str(tmp_path / "beside"), **SMALL, train={**common, "async_checkpoints": True})
    train(waiting)
    updated, save, update = threading.Event(), saving.save_checkpoint, Learner.update
    updates = []

    def held(root: Path, step: int, *arguments: Any, **options: Any) -> Path:
        # The first is written when the weights have moved on already.
        assert step > 1 or updated.wait(200)
        return save(root, step, *arguments, **options)

    def counted(self: Learner, *arguments: Any) -> Any:
        found = update(self, *arguments)
        updates.append(1)
        if len(updates) == 2:
            updated.set()
        return found

    monkeypatch.setattr(saving, "save_checkpoint", held)
    monkeypatch.setattr(Learner, "update", counted)
    train(beside)
    for step in (1, 2, 3):
        mine, theirs = (run.run / "checkpoints" / f"step-{step:06d}" for run in (beside, waiting))
        same_checkpoints(mine, theirs, hashes)
    assert all(record["checkpoint/waited_seconds"] > 0 for record in metrics_of(beside.run))
    assert metrics_of(beside.run)[2]["checkpoint/write_seconds"] > 0


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_run_that_is_killed_while_a_checkpoint_is_written_resumes_from_the_one_before(
    make_recipe: Callable[..., Recipe], hashes: Callable[[Path], dict[str, str]], tmp_path: Path, sharding: str
) -> None:
    settings = {"steps": 3, "sharding": sharding, "async_checkpoints": True}
    calm, cut = (make_recipe(run=str(tmp_path / name), **SMALL, train=settings) for name in ("calm", "cut"))
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump(cut.model_dump(mode="json")))
    killed = forked.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (half,) = (cut.run / "checkpoints").glob(".writing-step-000002-*")
    assert any(half.rglob("*.safetensors"))
    first = cut.run / "checkpoints" / "step-000001"
    assert latest_checkpoint(first.parent) == first
    train(calm)
    train(cut, resume=True)
    for step in (2, 3):
        same_checkpoints(*(run.run / "checkpoints" / f"step-{step:06d}" for run in (cut, calm)), hashes)
    assert not list(first.parent.glob(".writing-*"))


def test_a_write_that_fails_beside_training_is_said_and_the_run_goes_on(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(**SMALL, train={"steps": 2, "async_checkpoints": True})
    said: list[str] = []
    log, save, limits = Telemetry.log, saving.save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full_disk(root: Path, step: int, *arguments: Any, **options: Any) -> Path:
        if step == 1:  # no file may be longer than that, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            return save(root, step, *arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(saving, "save_checkpoint", full_disk)
    monkeypatch.setattr(Telemetry, "log", lambda self, line, **more: (said.append(line), log(self, line, **more)))
    train(recipe)
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "step-000001 cannot be written: model: " in warning and "File too large" in warning
    assert warning.endswith("let the run continue: it will try again with the next one.")
    assert [path.name for path in list_checkpoints(recipe.run / "checkpoints")] == ["step-000002"]
    assert metrics_of(recipe.run)[1]["checkpoint/failed"] == 1.0
