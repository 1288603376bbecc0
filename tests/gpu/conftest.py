"""Tests of what only a GPU does: minutes on one GPU, and no comparison of bits, which bfloat16 and atomics do not keep.

OPD_REHEARSAL=1 runs them on a CPU, to see that nothing is missing before a GPU is waited for.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.config import parse_settings
from student.settings.recipe import Recipe


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU; on a CPU the tests that ask for it are skipped unless they are rehearsed."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("OPD_REHEARSAL") != "1":
        pytest.skip("needs a CUDA device; OPD_REHEARSAL=1 rehearses on the CPU")
    return "cpu"


@pytest.fixture
def recipe(device: str, world: Path, teacher: Any, tmp_path: Path) -> Callable[..., Recipe]:
    """A short run of the test world."""

    def make(**train: Any) -> Recipe:
        data = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": [teacher.address], "default": "teacher"},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {
                **{"prompts_per_step": 8, "max_new_tokens": 8, "max_prompt_tokens": 32},
                "engine": {"name": "transformers", "mismatch_rows": 4},
            },
            "objective": [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
            "train": {"steps": 3, "learning_rate": 1e-3, "checkpoint_every": 1, "threads": 1, **train},
            "eval": {"prompts": 8},
        }
        return parse_settings(Recipe, data)

    return make
