"""Policy losses and credit whose statistics span the batch: two ranks learn what one does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_servers import serving
from run_records import metrics_of, records
from safetensors.torch import load_file

from student.job.session import train
from student.settings.recipe import Recipe
from tests.support.every_advantage import READ, every_advantage

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
    ours, theirs = (metrics_of(recipe.run) for recipe in (one, two))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("advantage_magnitude", "tapered_share", "ratio", "student_entropy", "grad_norm", "reward"):
            assert other[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    assert any(line["tapered_share"] > 0 for line in ours)
    last = "checkpoints/step-000003/model/model.safetensors"
    mine, other = load_file(one.run / last), load_file(two.run / last)
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-4, rtol=1e-3)


def test_every_advantage_gives_the_same_credit_on_two_ranks_and_when_a_step_is_taken_again(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    two_ranks: Callable[[Recipe], None],
    interrupted: Callable[..., dict[str, Any]],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    def says(path: str, body: Any) -> Any:
        return {"choices": [{"message": {"content": "Yes." if len(str(body)) % 2 else "No."}}]}

    estimators, modifiers = every_advantage()
    chains = [*([one] for one in estimators), *([{"name": "group_mean"}, one] for one in modifiers)]
    with serving() as judge:
        judge.say = says
        base = {
            "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
            "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4},
            "teachers": {"reference": "student"},
            "objective": [{"name": "policy_gradient", "advantage": chain} for chain in chains],
            "rewards": [
                {"name": "hapo"},
                {"name": "appeals", "endpoint": judge.url, "model": "judge", "share": 0.5},
                *READ,
            ],
            "methods": [{"name": "critic"}, {"name": "archer_critic"}, {"name": "hiper_critic"}],
            "train": {"steps": 2, "minibatches": 2, "micro_batch_tokens": 128},
            "eval": {"prompts": 0},
        }
        one, two, cut = (make_recipe(run=str(tmp_path / name), **base) for name in ("one", "two", "cut"))
        straight = train(one)
        again = interrupted(cut, update=3)  # of two updates a step, the first of the second step
        two_ranks(two)
    assert hashes(Path(again["checkpoint"])) == hashes(Path(straight["checkpoint"]))
    assert records(cut) == records(one)
    apart = []
    for mine, theirs in zip(records(one), records(two), strict=True):
        for number, chain in enumerate(chains):
            # The first term's metrics have no prefix.
            size = f"policy_gradient.{number}/advantage_magnitude" if number else "advantage_magnitude"
            for name in (f"loss/policy_gradient.{number}", size):
                if theirs[name] != pytest.approx(mine[name], rel=1e-4, abs=1e-5):
                    apart.append(f"{chain[-1]['name']}: {name} is {mine[name]} on one rank, {theirs[name]} on two")
    assert not apart, "\n".join(apart)
    last = "checkpoints/step-000002/model/model.safetensors"
    found, expected = load_file(two.run / last), load_file(one.run / last)
    assert all(torch.allclose(found[key], tensor, atol=1e-5) for key, tensor in expected.items())
