"""Systems of the zoo in short runs beside a twin without them: each shows that it acted, in metric and weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_servers import serving
from run_records import metrics_of
from safetensors.torch import load_file

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = pytest.mark.zoo

COLUMNS = {"solution": "12:3", "rubric": ["is even", {"criterion": "is odd", "weight": 3}], "hardness": 2.0}
GRPO: dict[str, Any] = {"objective": [{"name": "policy_gradient", "advantage": [{"name": "group_mean"}]}]}
AGAIN = {"name": "again", "options": {"verifier": "student_plugins:Even", "word": "=", "reward": "last"}}
PLAYED: dict[str, Any] = {
    "columns": {**COLUMNS, "environment": AGAIN},
    "rollout": {"max_new_tokens": 24, "episodes": {"turns": 2, "turn_tokens": 4, "isolation": "none"}},
    "objective": [{"name": "policy_gradient", "advantage": [{"name": "trloo"}]}],
}
TAUGHT: dict[str, Any] = {
    "methods": [{"name": "expert_rows", "share": 0.5}],
    "objective": [{"name": "sft", "rows": "expert"}],
}
CHAT = {"endpoint": "SERVER", "model": "m"}


def credit(*entries: Any) -> dict[str, Any]:
    chain = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    return {"objective": [{"name": "policy_gradient", "advantage": chain}]}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "VERIRL": (GRPO, credit("group_mean", "sample_balance"), "sample_balance/weight"),
    "PuzzleCraft": (
        GRPO,
        {**credit("group_mean", "puzzlecraft"), "rewards": [{"name": "answer_classes"}]},
        "puzzlecraft/dispersion",
    ),
    "GRPO-S": (GRPO, credit("group_mean", {"name": "grpo_s", "column": "hardness"}), "grpo_s/gap"),
    "SPAE": (GRPO, {**credit("spae"), "rewards": [{"name": "spae", "mark": "1"}]}, "spae/rise"),
    "SPO": (GRPO, {"rewards": [{"name": "spo", **CHAT}]}, "reward"),
    "RGR-GRPO": (
        GRPO,
        {
            "rewards": [{"name": "rubric", **CHAT}],
            "objective": [{"name": "mixed_context"}],
            "rollout": {"strategy": {"name": "rubric_guide"}},
        },
        "rubric_guide/tried_share",
    ),
    "StableReinforce": (GRPO, {"rewards": [{"name": "consistency", **CHAT, "marks": ["1"]}]}, "consistency/consistent"),
    "CURE": (GRPO, {"rollout": {"strategy": {"name": "cure", "branches": 1}}}, "cure/cut_entropy"),
    "SEELE": (GRPO, {"rollout": {"strategy": {"name": "seele", "rounds": 2}}}, "seele/rate"),
    "SvS": (GRPO, {"rollout": {"strategy": {"name": "svs", "low": 0.0, "high": 1.0}}}, "svs/rewritten_share"),
    "ScaleRL": (GRPO, {"methods": [{"name": "retire", "limit": 0.4}]}, "retire/gain"),
    "SwS": (GRPO, {"methods": [{"name": "weak_prompts"}]}, "weak_prompts/replaced"),
    "ExIt": (GRPO, {"methods": [{"name": "exit", "new": 0.0, "again": 1.0, "candidates": 2}]}, "exit/replaced"),
    "G2RL": (GRPO, {"methods": [{"name": "g2rl"}]}, "g2rl/novelty"),
    "InfoPO": (
        PLAYED,
        {**PLAYED, **credit("infopo"), "rewards": [{"name": "infopo", "blank": "0"}]},
        "infopo/gain",
    ),
    "MAPO": (PLAYED, {**PLAYED, **credit("mapo"), "rewards": [{"name": "turn_judge", **CHAT}]}, "turn_judge/grade"),
    "Diversity or Precision": (TAUGHT, {**TAUGHT, "objective": [{"name": "precision"}]}, "tail_mass"),
    "RMT": (TAUGHT, {**TAUGHT, "objective": [{"name": "rmt", "first": 0.4}]}, "selected_entropy"),
}


def says(path: str, body: Any) -> Any:
    """Judges by the text alone: the longer answer, an odd sum of its characters, a grade by the length."""
    asked = body["messages"][0]["content"]
    if "Answer 2:" in asked:
        first, second = (len(asked.split(mark)[1].split("\n\n")[0]) for mark in ("Answer 1:", "Answer 2:"))
        word = "tie" if first == second else "1" if first > second else "2"
    else:
        word = f"Grade: {len(asked) % 10}" if "Grade" in asked else "yes" if sum(asked.encode()) % 2 else "no"
    return {"choices": [{"message": {"content": word}}]}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as made:
        made.say = says
        yield made.url


@pytest.fixture
def ran(world: Path, tmp_path: Path, server: str) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    def run(name: str, columns: Any = COLUMNS, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        table = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), **columns} for i in range(9)]
        table.write_text("\n".join(map(json.dumps, rows)).replace("SERVER", server))
        keep = [column for column in columns if column != "environment"]
        small = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 8, "max_prompt_tokens": 320}
        data = {
            "run": str(tmp_path / name),
            "model": {"path": str(world / "student")},
            "prompts": {
                "file": str(table),
                "verifier": "student_plugins:Even",
                "heldout": 0,
                "keep_columns": keep,
            },
            "train": {"steps": 4, "learning_rate": 1e-2, "threads": 1, "checkpoint_every": 0},
            "eval": {"prompts": 0},
            **{key: value for key, value in changes.items() if key != "rollout"},
            "rollout": {**small, **changes.get("rollout", {})},
        }
        recipe = parse_settings(Recipe, json.loads(json.dumps(data).replace("SERVER", server)))
        summary = train(recipe)
        return metrics_of(recipe.run), load_file(Path(summary["checkpoint"]) / "model" / "model.safetensors")

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_system_acts_and_ends_with_other_weights_than_its_twin(case: str, ran: Callable[..., Any]) -> None:
    without, changes, metric = CASES[case]
    _, plain = ran("plain", **without)
    steps, weights = ran("with", **{**without, **changes})
    assert any(step.get(metric) for step in steps), sorted(set().union(*steps))
    assert any(not torch.equal(weights[name], tensor) for name, tensor in plain.items())
    assert any(step.get("grad_norm", 0.0) > 0 for step in steps)


EPISODES = {"turns": 4, "turn_tokens": 6, "isolation": "none"}
WORLDS: dict[str, dict[str, Any]] = {
    "bandit": {
        "prompts": {"task": "bandit", "options": {"turns": 3, "words": "{pay}\n"}},
        "rollout": {"episodes": EPISODES, "max_new_tokens": 40},
    },
    "bandit, by the pulls of UCB": {
        "prompts": {"task": "bandit", "options": {"turns": 3, "words": "{pay}\n"}},
        "rollout": {"episodes": EPISODES, "max_new_tokens": 40},
        "methods": [{"name": "expert_rows", "share": 0.5, "source": "path"}],
        "objective": [{"name": "sft"}],
    },
    "preference": {
        "columns": {
            "chosen": "7",
            "rejected": "8",
            "environment": {"name": "preference", "options": {"first": "{a} {b}"}},
        },
        "rollout": {"episodes": EPISODES, "max_new_tokens": 140},
    },
    "router": {
        "columns": {"environment": {"name": "router", "options": {"models": {"m": CHAT}}}},
        "rollout": {"episodes": EPISODES, "max_new_tokens": 140},
    },
    "graphs": {"prompts": {"task": "graphs", "options": {"nodes": 4, "kinds": ["degree", "edge"]}}},
    "optimisation": {"prompts": {"task": "optimisation", "options": {"kinds": ["partition"]}}},
    "segments": {"prompts": {"task": "segments", "options": {"file": "TEXTS", "judge": CHAT}}},
}


@pytest.mark.parametrize("world_name", WORLDS)
def test_a_world_is_played_or_answered_and_learnt_from(
    world_name: str, ran: Callable[..., Any], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a{i}\n\nb{i}\n\nc{i}"}) + "\n" for i in range(9)))
    changes = json.loads(json.dumps(WORLDS[world_name]).replace("TEXTS", str(texts)))
    steps, _ = ran("world", **{"columns": {}, **GRPO, **changes})
    assert len(steps) == 4 and all("reward" in step or "verdict" in step for step in steps)
    assert all(step["unknown_share"] == 0.0 for step in steps if "unknown_share" in step)
    assert any(step.get("updates", 0) > 0 for step in steps)
