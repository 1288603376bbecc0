"""TRUSTEE through the whole loop: simulators over HTTP that answer, fail, and see their student killed."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from judge_servers import Server, serving
from simulated_world import TOOLS, simulate

from student.loop import train
from student.recipe import Recipe


def say(path: str, body: dict[str, Any]) -> Any:
    return {"choices": [{"message": {"content": simulate(body["messages"])}}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        made.say = say
        yield made


def changes(server: Server, *, isolation: str = "process", task: str = "simulated", **options: Any) -> dict[str, Any]:
    simulator = {"endpoint": server.url, "model": "m", "attempts": 1}
    return {
        "prompts": {"task": task, "options": {"simulator": simulator, "tools": {"sums": TOOLS["sums"][1:]}, **options}},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_new_tokens": 60,
            "max_prompt_tokens": 440,
            "episodes": {"turns": 5, "turn_tokens": 3, "isolation": isolation},
        },
        "objective": [{"name": "opd", "payload": "gather", "k": 8}, {"name": "grpo"}],
        "methods": [{"name": "trustee", "first": 100, "softness": 0.0}],
        "rewards": [{"name": "trustee"}],
        "eval": {"prompts": 0},
    }


def metrics(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]


def test_simulators_that_fail_cost_their_episodes_and_not_the_run(
    make_recipe: Callable[..., Recipe], tmp_path: Path, server: Server
) -> None:
    def fail(path: str, body: dict[str, Any]) -> Any:
        told = body["messages"][-1]["content"]
        if body["messages"][0]["content"].startswith("You write tasks"):
            return 500 if "Case 1" in told else say(path, body)
        return 500 if re.search(r"User: [0-4]\+1=", told) else say(path, body)

    server.say = fail
    recipe = make_recipe(**changes(server), run=str(tmp_path / "run"), train={"steps": 3})
    assert train(recipe)["steps"] == 3
    found = metrics(recipe)
    assert all(line["trustee/aborted"] == line["episodes_broken"] < 1 for line in found)
    assert any(line["trustee/tasks_failed"] > 0 for line in found)
    assert any(line["trustee/tasks_failed"] < line["trustee/aborted"] for line in found)


@pytest.mark.slow
def test_a_run_that_is_killed_while_a_user_is_simulated_resumes_to_the_same_weights(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    server: Server,
) -> None:
    cut, flag = tmp_path / "cut", tmp_path / "killed"
    after = str(cut / "checkpoints" / "step-000001")
    task = "tests.support.environments:DeadlySimulated"
    same = changes(server, isolation="none", task=task, after=after, flag=str(flag))
    recipe = tmp_path / "cut.yaml"
    recipe.write_text(yaml.safe_dump(make_recipe(**same, run=str(cut), train={"steps": 3}).model_dump(mode="json")))
    killed = forked.run([sys.executable, "-m", "opd.cli", "train", str(recipe)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL and flag.exists(), killed.stderr
    resumed = train(make_recipe(**same, run=str(cut), train={"steps": 3}), resume=True)
    calm = train(make_recipe(**same, run=str(tmp_path / "calm"), train={"steps": 3}))
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(calm["checkpoint"]))
