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
