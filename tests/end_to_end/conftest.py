"""Recipes and runs of the test world against a real server process."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import parse_settings
from student.recipe import Recipe


def weights_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor file of a checkpoint."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.fixture
def hashes() -> Callable[[Path], dict[str, str]]:
    return weights_of


@pytest.fixture
def recipe_data(world: Path, teacher: Any, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [teacher.address], "default": "teacher"},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 8, "max_new_tokens": 12, "max_prompt_tokens": 32},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        "train": {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1},
        "eval": {"prompts": 8},
    }


@pytest.fixture
def make_recipe(recipe_data: dict[str, Any]) -> Callable[..., Recipe]:
    def make(**changes: Any) -> Recipe:
        data = {**recipe_data}
        for key, value in changes.items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) and key != "prompts" else value
        return parse_settings(Recipe, data)

    return make


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `opd train` on two ranks (torchrun, gloo) in a group of its own; it ends with the test."""
    started: list[subprocess.Popen[str]] = []
    plugins = Path(__file__).parents[1] / "support"

    def start(recipe: Recipe, *flags: str) -> subprocess.Popen[str]:
        path = tmp_path / f"{recipe.run.name}.yaml"
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        paths = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [*torchrun, "-m", "opd.cli", "train", str(path), *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def two_ranks(launch: Callable[..., subprocess.Popen[str]]) -> Callable[..., None]:
    """Train a recipe on two ranks to its end."""

    def run(recipe: Recipe, *flags: str) -> None:
        process = launch(recipe, *flags)
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors

    return run
