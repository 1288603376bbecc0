"""RL plug-ins in real trainings: those that ask a judge, read models or choose prompts, and the rest beside them.

What each computes is in its golden test; here it has learnt for some steps beside the others, and shows that it acted.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_servers import Server, serving
from run_records import metrics_of

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe
from tests.support.every_advantage import READ, every_advantage

pytestmark = pytest.mark.zoo

Steps = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def steps_of(world: Path, tmp_path: Path) -> Steps:
    """Train, on sums of two domains and depths, and give the lines of metrics.jsonl."""
    columns = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "domain": f"d{i % 2}"} for i in range(16)]
    table = tmp_path / "prompts.jsonl"
    extra = [{**row, "depth": 1 + i % 2, "hint": "2", "constraints": ["short"]} for i, row in enumerate(columns)]
    table.write_text("\n".join(map(json.dumps, extra)))
    prompts = {"file": str(table), "verifier": "numeric", "heldout": 0}

    def run(name: str, **changes: Any) -> list[dict[str, Any]]:
        rollout = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 5, "max_prompt_tokens": 24}
        base = {
            "run": str(tmp_path / name),
            "model": {"path": str(world / "student")},
            "prompts": {**prompts, "keep_columns": ["depth", "hint", "constraints"]},
            "objective": [{"name": "policy_gradient", "ratio": "none", "advantage": {"name": "reinforce"}}],
            "train": {"steps": 2, "learning_rate": 1e-3, "threads": 1, "checkpoint_every": 0},
            "eval": {"prompts": 0},
        }
        merged = {**base, **changes, "rollout": {**rollout, **changes.get("rollout", {})}}
        recipe = parse_settings(Recipe, merged)
        train(recipe)
        return metrics_of(recipe.run)

    return run


def says(path: str, body: Any) -> Any:
    """A judge that quotes a digit, grants every appeal, and grades."""
    asked = body["messages"][0]["content"] if "messages" in body else ""
    text = "Yes." if "yes" in asked else '{"good": ["1"], "bad": ["2"]}' if "Quote" in asked else "Grade: 7"
    return {"score": 0.5, "choices": [{"message": {"content": text}}]}


def test_text2grad_rto_appeals_and_pcl_learn_for_three_steps(steps_of: Steps, server: Server, teacher: Any) -> None:
    server.say = says
    chat = {"endpoint": f"{server.url}/v1", "model": "judge"}
    steps = steps_of(
        "judged",
        teachers={"endpoints": [teacher.address], "default": "teacher", "reference": "student"},
        objective=[
            {"name": "ppo"},
            {"name": "policy_gradient", "ratio": "none", "advantage": {"name": "noisy_forward", "learns": True}},
        ],
        rewards=[
            {"name": "text2grad", **chat, "adds": True},
            {"name": "rto"},
            {"name": "kl_penalty", "beta": 0.2},
            {"name": "appeals", **chat, "share": 1.0},
        ],
        methods=[{"name": "pcl"}, {"name": "critic"}],
        train={"steps": 3, "learning_rate": 1e-3, "threads": 1, "checkpoint_every": 0},
    )
    assert len(steps) == 3 and all(step["grad_norm"] > 0 for step in steps)
    assert all(step["text2grad/unknown"] == 0 and step["text2grad/unmatched"] < 1 for step in steps)
    assert all("rto/clipped" in step and "rto/by_token" in step and "kl_penalty/by_token" in step for step in steps)
    assert all(step["appeals/unknown"] == 0 and step["appeals/overturned"] == 1 for step in steps)
    assert steps[-1]["pcl/known"] == 1 and any(step["pcl/replaced"] > 0 for step in steps)


def test_every_advantage_learns_in_a_run(steps_of: Steps, server: Server, teacher: Any) -> None:
    """All estimators beside each other, each alone in a term, and all modifiers behind one."""
    server.say = says
    first, then = every_advantage()
    chains: list[list[dict[str, Any]]] = [*([one] for one in first), [{"name": "group_mean"}, *then]]
    steps = steps_of(
        "advantages",
        teachers={"endpoints": [teacher.address], "default": "teacher", "reference": "student"},
        objective=[{"name": "policy_gradient", "advantage": chain} for chain in chains],
        rewards=[{"name": "hapo"}, {"name": "appeals", "endpoint": server.url, "model": "judge"}, *READ],
        methods=[{"name": "critic"}, {"name": "archer_critic"}, {"name": "hiper_critic"}],
    )
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    for number in range(len(chains)):
        name = "advantage_magnitude" if not number else f"policy_gradient.{number}/advantage_magnitude"
        assert all(step[name] >= 0 for step in steps), chains[number]


def test_every_other_sampler_chooses_in_a_run(steps_of: Steps) -> None:
    names = ("random_prompts", "sec", "positive_negative", "depth_curriculum", "drive", "stages")
    steps = steps_of("samplers", methods=[{"name": name, "candidates": 2} for name in names])
    assert len(steps) == 2 and all(f"{name}/informative_share" in step for step in steps for name in names)


@pytest.mark.parametrize(
    ("name", "settings", "objective"),
    [
        ("adaptive_oversampling", {}, "policy_gradient"),
        ("reinforce_ada", {"rounds": 2}, "policy_gradient"),
        ("self_interference", {"rounds": 2, "threshold": 2.0}, "policy_gradient"),
        ("lte", {"threshold": 2.0}, "mixed_context"),
        ("guide", {"band": False}, "mixed_context"),
    ],
)
def test_every_other_strategy_learns_for_two_steps(
    steps_of: Steps, name: str, settings: dict[str, Any], objective: str
) -> None:
    reward = {"name": "ttrv", "diversity": 0.0}
    steps = steps_of(
        name,
        rollout={"strategy": {"name": name, **settings}},
        objective=[{"name": objective, "advantage": {"name": "reinforce"}}],
        rewards=[reward],
    )
    assert len(steps) == 2 and all(any(key.startswith(name) for key in step) for step in steps)
    assert any(step.get("grad_norm", 0.0) > 0 for step in steps)


@pytest.mark.parametrize(
    "reward",
    [
        {"name": "dler", "limit": 3},
        {"name": "rl_struct"},
        {"name": "noisy_verifier", "false_negative": 0.2},
        {"name": "tulu3"},
        {"name": "judge", "model": "judge"},
        {"name": "http_judge"},
        {"name": "checklist", "model": "judge"},
    ],
    ids=lambda reward: str(reward["name"]),
)
def test_every_other_whole_reward_is_learnt_from_for_two_steps(
    steps_of: Steps, server: Server, reward: dict[str, Any]
) -> None:
    server.say = says
    asks = reward["name"] in ("judge", "http_judge", "checklist")
    steps = steps_of(reward["name"], rewards=[{**reward, **({"endpoint": server.url} if asks else {})}])
    assert len(steps) == 2 and all("reward" in step for step in steps)
    assert bool(server.asked) == asks
