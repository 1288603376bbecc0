"""A run folder has one holder, whoever else starts at the same time."""

import json
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from opd.config import parse_settings
from opd.config.text import read_yaml
from opd.errors import CheckpointError, RunFolderError
from student.job.session import train
from student.run.folder import RunFolder
from student.settings.recipe import Recipe

STARTS, ROUNDS = 6, 40


def recipe(path: Path, seed: int) -> Recipe:
    return parse_settings(
        Recipe, {"run": str(path), "seed": seed, "model": {"path": "m"}, "prompts": {"task": "addition"}}
    )


def start_runs(folder: Path, seed: int, barrier: Barrier) -> None:
    """Start a run of its own seed in every round's folder at once with the other processes, and say which were held."""
    held = []
    for number in range(ROUNDS):
        barrier.wait()
        try:
            with RunFolder.create(recipe(folder / str(number), seed)).alone():
                held.append(number)
                barrier.wait()  # all have tried before one lets go
        except RunFolderError:
            barrier.wait()
    (folder / f"held-{seed}.json").write_text(json.dumps(held))


def test_one_of_many_runs_that_start_at_once_has_the_folder_and_its_own_recipe_there(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(STARTS, timeout=60)
    runs = [fork.Process(target=start_runs, args=(tmp_path, seed, barrier)) for seed in range(STARTS)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
        assert run.exitcode == 0
    holders = {seed: json.loads((tmp_path / f"held-{seed}.json").read_text()) for seed in range(STARTS)}
    for number in range(ROUNDS):
        held = [seed for seed, folders in holders.items() if number in folders]
        written = read_yaml((tmp_path / str(number) / "recipe.yaml").read_text())
        assert held == [written["seed"]]
        assert {path.name for path in (tmp_path / str(number)).iterdir()} == {"recipe.yaml", ".lock"}


def test_a_resumed_run_compares_recipes_only_once_it_holds_the_folder(tmp_path: Path) -> None:
    other = RunFolder.create(recipe(tmp_path / "run", seed=0))
    (other.checkpoints / "step-000001").mkdir(parents=True)
    resumed = recipe(tmp_path / "run", seed=1)  # of another seed, which does not fit those checkpoints
    with other.alone(), pytest.raises(RunFolderError, match="another process writes"):
        train(resumed, resume=True)
    with pytest.raises(CheckpointError, match="seed"):
        train(resumed, resume=True)
