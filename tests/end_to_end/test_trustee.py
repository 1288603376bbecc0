"""TRUSTEE through the whole loop: simulators over HTTP that answer, fail, and see their student killed."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_servers import Server, serving
from run_records import metrics_of, records
from simulated_world import TOOLS, say

from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = pytest.mark.zoo


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        made.say = say
        yield made


def changes(server: Server, *, isolation: str = "process") -> dict[str, Any]:
    simulator = {"endpoint": server.url, "model": "m", "attempts": 1}
    return {
        "prompts": {"task": "simulated", "options": {"simulator": simulator, "tools": {"sums": TOOLS["sums"][1:]}}},
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
    found = metrics_of(recipe.run)
    assert all(line["trustee/aborted"] == line["episodes_broken"] < 1 for line in found)
    assert any(line["trustee/tasks_failed"] > 0 for line in found)
    assert any(line["trustee/tasks_failed"] < line["trustee/aborted"] for line in found)


def test_a_step_that_is_taken_again_has_the_same_metrics(
    make_recipe: Callable[..., Recipe], interrupted: Callable[..., Any], tmp_path: Path, server: Server
) -> None:
    same = changes(server, isolation="none")
    same["prompts"]["options"]["simulator"]["cache"] = str(tmp_path / "answers")
    calm, cut = (make_recipe(**same, run=str(tmp_path / name), train={"steps": 3}) for name in ("calm", "cut"))
    train(calm)
    interrupted(cut)
    assert records(cut) == records(calm) and all(line["trustee/simulator_questions"] > 0 for line in records(calm))


@pytest.mark.slow
def test_a_run_that_is_killed_while_a_user_is_simulated_resumes_to_the_same_weights(
    killed_and_resumed: Callable[..., Recipe], server: Server
) -> None:
    same = changes(server, isolation="none")
    killed_and_resumed("DeadlySimulated", same.pop("prompts")["options"], **same, train={"steps": 3})
