"""A student that is a mixture of experts, through the whole loop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from student.loop import train
from student.recipe import Recipe


def test_experts_and_router_learn_whole_or_sharded(
    make_recipe: Callable[..., Recipe], experts: Path, tmp_path: Path
) -> None:
    lines, weights = [], []
    for sharding in ("none", "fsdp"):
        changes: dict[str, Any] = {"model": {"path": str(experts)}, "eval": {"prompts": 0}}
        changes["train"] = {"steps": 2, "sharding": sharding, "learning_rate": 1e-2}
        run = make_recipe(run=str(tmp_path / sharding), **changes)
        train(run)
        lines.append([json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()])
        weights.append(load_file(run.run / "checkpoints" / "step-000002" / "model" / "model.safetensors"))
    first = load_file(experts / "model.safetensors")
    assert set(first) == set(weights[0]) == set(weights[1])  # an expert a tensor, as others load them
    moved = [name for name, tensor in weights[0].items() if not torch.equal(tensor, first[name])]
    assert any(".mlp.gate." in name for name in moved) and any(".experts.3." in name for name in moved)
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss/opd", "grad_norm", "response_tokens"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_two_ranks_replay_and_learn_like_one_whole_or_sharded(
    make_recipe: Callable[..., Recipe], experts: Path, tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    changes: dict[str, Any] = {
        "model": {"path": str(experts)},
        "eval": {"prompts": 0},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
    }
    train_of = {"steps": 2, "minibatches": 2, "learning_rate": 1e-2, "micro_batch_tokens": 64}
    runs = [
        make_recipe(
            run=str(tmp_path / f"{sharding}-{source}"),
            methods=[{"name": "routing_replay", "source": source}],
            train={**train_of, "sharding": sharding},
            **changes,
        )
        for sharding, source in (("none", "rollout"), ("fsdp", "old"))
    ]
    two_ranks(*runs)
    for two in runs:
        one = two.model_copy(update={"run": two.run.with_name(f"{two.run.name}-one")})
        train(one)
        for mine, theirs in zip(records(one), records(two), strict=True):
            assert mine["routing/replayed"] > 0.5
            for name in ("loss/opd", "grad_norm", "routing/replayed", "routing/changed"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4), name


def records(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]
