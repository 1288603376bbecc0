"""The job that the tests of deploy/ run on a machine, in containers and under Slurm."""

from pathlib import Path
from typing import Any


def student_recipe(models: str | Path, endpoints: list[str], *, steps: int = 1_000_000, **more: Any) -> dict[str, Any]:
    """The recipe of a student of the test world, which goes on until it is stopped, and saves then.

    Args:
        models: the folder of the world, where the student runs.
        endpoints: servers of its teacher; none where the command line names them.
        steps: where it ends.
        more: further keys.
    """
    return {
        "model": {"path": f"{models}/student"},
        "teachers": {"endpoints": endpoints, "default": "teacher"},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 8, "max_new_tokens": 12, "max_prompt_tokens": 32},
        "train": {"steps": steps, "threads": 1, "checkpoint_every": 1_000_000},
        "eval": {"prompts": 0},
        **more,
    }
