"""A whole training that samples with a server, beside learning and in turn; the server is a stand-in for SGLang."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from student.loop import train
from student.recipe import Recipe
from tests.support.sglang_rollouts import SglangRollouts


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_samples_each_step_with_the_weights_that_it_says(
    make_recipe: Callable[..., Recipe], world: Path, staleness: int
) -> None:
    server = SglangRollouts(world / "student")
    try:
        recipe = make_recipe(
            objective=[{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
            eval={"prompts": 0},
            train={"steps": 4, "max_staleness": staleness, "learning_rate": 1e-2},
            rollout={"engine": {"name": "sglang_server", "endpoints": [server.url], "mismatch_limit": 1e-3}},
        )
        train(recipe)
    finally:
        server.close()
    lines = [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] if staleness else 0 for line in lines] == [min(step, staleness) for step in range(4)]
    # Of the weights that sampled, which the server says it holds: those of other steps are much further away.
    assert all(line["mismatch/log_ratio"] < 1e-4 for line in lines)
    loads = [body["weight_version"] for path, body in server.asked if path == "/update_weights_from_disk"]
    assert len(loads) == len(set(loads)) == 4 - staleness
    assert not recipe.run.with_name(f"{recipe.run.name}.rollout").exists()
