"""A student that is a mixture of experts, through the whole loop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from student.loop import train
from student.recipe import Recipe


@pytest.fixture
def experts(world: Path, tmp_path: Path) -> Path:
    """Four experts of which a token passes two, with the tokenizer of the test world."""
    base = AutoConfig.from_pretrained(world / "student")
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(base, name) for name in same}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    folder = tmp_path / "experts"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(folder)
    return folder


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
