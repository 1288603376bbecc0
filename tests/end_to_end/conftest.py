"""Recipes and runs of the test world against a real server process."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
