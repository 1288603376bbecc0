"""Policy losses whose statistics span the batch: two ranks learn what one does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from student.loop import train
from student.recipe import Recipe

pytestmark = pytest.mark.slow


def test_two_ranks_share_batch_statistics_strata_and_the_old_policy(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[[Recipe], None]
) -> None:
    # Three groups: one rank has two of them, and in a minibatch one has none.
    base = {
        "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4},
        "objective": [
            {
                "name": "cispo",
                "cap": 1.01,
                "ratio_to": "old",
                "aggregation": "balanced",
                "advantage": [{"name": "lite_ppo"}, {"name": "outliers"}],
            }
        ],
        "train": {"steps": 3, "minibatches": 3},
        "eval": {"prompts": 0},
    }
    one, two = (make_recipe(run=str(tmp_path / name), **base) for name in ("one", "two"))
    train(one)
    two_ranks(two)
    ours, theirs = (
        [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()] for recipe in (one, two)
    )
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("advantage_magnitude", "tapered_share", "ratio", "student_entropy", "grad_norm", "reward"):
            assert other[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    assert any(line["tapered_share"] > 0 for line in ours)
    last = "checkpoints/step-000003/model/model.safetensors"
    mine, other = load_file(one.run / last), load_file(two.run / last)
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-4, rtol=1e-3)
