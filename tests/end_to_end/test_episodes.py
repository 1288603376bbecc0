"""Episodes through the whole loop with a real teacher: sampled, scored, learnt from, resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from student.loop import train
from student.recipe import Recipe

LOCK: dict[str, Any] = {
    "prompts": {"task": "lock", "options": {"digits": 3, "turns": 5}},
    "rollout": {
        "prompts_per_step": 6,
        "max_new_tokens": 40,
        "episodes": {"turns": 5, "turn_tokens": 3, "isolation": "none"},
    },
    "eval": {"prompts": 4},
}


def metrics(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["f2b", "b2f"])
def test_a_curriculum_of_turns_runs_and_resumes_to_the_same_weights(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]], order: str
) -> None:
    changes = LOCK | {"methods": [{"name": "tcod", "order": order, "every": 1, "turns": 3}]}
    calm_recipe = make_recipe(**changes, run=str(tmp_path / "calm"))
    calm = train(calm_recipe)
    train(make_recipe(**changes, run=str(tmp_path / "cut"), train={"steps": 2}))
    resumed = train(make_recipe(**changes, run=str(tmp_path / "cut")), resume=True)
    assert hashes(Path(calm["checkpoint"])) == hashes(Path(resumed["checkpoint"]))
    found = metrics(calm_recipe)
    assert [line["turn_depth"] for line in found] == [1, 2, 3, 3]
    if order == "f2b":
        assert [line["turns"] for line in found] == [1, 2, 3, 3]
        assert all(f"kl_by_turn/{depth}" in line for depth, line in zip((1, 2, 3, 3), found, strict=True))
    else:
        assert "kl_by_turn/3" in found[0] and "kl_by_turn/1" not in found[0]
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 for line in found)
    assert calm["before"]["accuracy"] is not None


@pytest.mark.slow
def test_episodes_in_processes_give_the_run_that_they_give_in_process(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    found = []
    for isolation in ("none", "process"):
        rollout = LOCK["rollout"] | {"episodes": LOCK["rollout"]["episodes"] | {"isolation": isolation}}
        recipe = make_recipe(**LOCK | {"rollout": rollout}, run=str(tmp_path / isolation), train={"steps": 2})
        found.append(hashes(Path(train(recipe)["checkpoint"])))
    assert found[0] == found[1]
