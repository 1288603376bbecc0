"""A training whose OpenEnv server dies in the middle of it, killed by its own environment at a given action."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_records import metrics_of
from waiting import PATIENCE

from student.job.session import train
from student.settings.recipe import Recipe


def test_its_episodes_break_and_are_counted_and_the_run_goes_on(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    opd = str(Path(sys.executable).with_name("opd"))
    serve = [opd, "env", "serve", "tests.support.environments:Mortal", "--port", "0"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            options = {"url": url, "action": "message", "observation": "text", "columns": ["prompt"]}
            place = {"name": "openenv", "options": options}
            lines = [{"prompt": f"{number}+1=", "environment": place} for number in range(8)]
            prompts = tmp_path / "prompts.jsonl"
            prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
            episodes = {"turns": 3, "turn_tokens": 2, "isolation": "none"}
            changes: dict[str, Any] = {
                "prompts": {"file": str(prompts), "keep_columns": ["prompt"]},
                "rollout": {"prompts_per_step": 4, "max_new_tokens": 40, "episodes": episodes},
                "train": {"steps": 3},
                "eval": {"prompts": 0},
            }
            recipe = make_recipe(**changes, run=str(tmp_path / "run"))
            train(recipe)
            assert server.wait(PATIENCE) == 3
        finally:
            server.kill()
    found = metrics_of(recipe.run)
    # Eight episodes of the first evaluation and four of a step are over, two actions each, when the server dies.
    assert [line["episodes_broken"] for line in found] == [0, 1, 1]
    assert found[0]["grad_norm"] > 0
