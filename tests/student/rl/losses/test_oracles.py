"""Policy losses against TRL 1.16's on the same numbers: `make oracles`. Skipped where it is not installed.

Where the two differ by design, a setting of ours makes them equal: TRL adds 1e-4 to a group's deviation and we 1e-6;
its CISPO bounds the ratio from above alone, as ours does with floor 0; its RLOO clips the ratio of the whole response,
ours has none unless it is asked for.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from off_policy import LIMIT, REWARDS, off_policy

from student.learning.objective import Objective
from student.plugin.terms import build_terms

pytestmark = pytest.mark.oracle
GROUP = {"name": "group_mean", "epsilon": 1e-4}
PLAIN = {"name": "group_mean", "scale": "none"}


def padded(made: Any, values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    out = torch.zeros(len(rows), LIMIT, dtype=values.dtype)
    for place, index in enumerate(rows):
        mine = values[made.row == index]
        out[place, : len(mine)] = mine
    return out


def ours(made: Any, entry: dict[str, Any], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    objective = Objective(build_terms([entry]), length_limit=LIMIT)
    made.hidden = made.hidden.detach().clone().requires_grad_()
    chosen = [made.rows[index] for index in rows]
    objective.prepare(made.rows)
    objective.prepare(chosen)
    weights = objective.position_weights(chosen, torch.device("cpu"))
    loss, _ = objective.loss(made.batch(rows), weights)
    loss.backward()
    return loss.detach(), made.hidden.grad


def theirs(
    made: Any, trainer: Any, rows: list[int], advantages: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's own loss method, with the few things of a trainer that it reads."""
    made.hidden = made.hidden.detach().clone().requires_grad_()
    live = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    mask = torch.cat([torch.from_numpy(row.loss_mask) for row in made.rows]).double()
    logps, kept = padded(made, live, rows), padded(made, mask, rows)
    old = padded(made, made.behaviour.nan_to_num(), rows)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    vars(self).update(settings)
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1),
        "prompt_mask": torch.ones(len(rows), 1),
        "completion_ids": kept,
        "completion_mask": kept,
        "advantages": advantages[rows],
        "old_per_token_logps": old,
        "old_logps": (old * kept).sum(1),
        "num_items_in_batch": kept.sum(),
    }
    loss = trainer._compute_loss(self, None, inputs)
    loss.backward()
    return loss.detach(), made.hidden.grad


def grouped(scale: bool) -> torch.Tensor:
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(2, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4) if scale else centred).flatten()


def leave_one_out() -> torch.Tensor:
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(2, 4)
    return (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "grpo", "advantage": GROUP}, {"loss_type": "grpo"}),
    ({"name": "grpo", "advantage": GROUP, "aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    ({"name": "dr_grpo", "advantage": PLAIN}, {"loss_type": "dr_grpo"}),
    ({"name": "dapo", "advantage": GROUP}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    (
        {"name": "gspo", "advantage": GROUP},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    (
        {"name": "gspo", "advantage": GROUP, "clip_low": 0.2, "clip_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    ({"name": "cispo", "advantage": GROUP, "cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ({"name": "cispo", "advantage": GROUP}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    (
        {"name": "grpo", "advantage": GROUP, "clip_low": 0.1, "clip_high": 0.4},
        {"epsilon_low": 0.1, "epsilon_high": 0.4},
    ),
    (
        {"name": "grpo", "advantage": GROUP, "dual_clip": 1.3},
        {"args": SimpleNamespace(delta=1.3, steps_per_generation=1)},
    ),
]


@pytest.mark.parametrize("rows", [list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7]], ids=["batch", "first", "second"])
@pytest.mark.parametrize(("entry", "settings"), CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_trls_grpo_losses_agree_in_value_and_gradient(
    toy: Any, entry: dict[str, Any], settings: dict[str, Any], rows: list[int]
) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    settings = {"loss_type": "grpo"} | settings
    for seed in range(3):
        made = off_policy(toy, seed, spread=0.3)
        scale = entry["advantage"].get("scale") != "none"
        want, slope = theirs(made, trainer, rows, grouped(scale), **settings)
        got, gradient = ours(made, entry, rows)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, check_dtype=False)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-7)
        assert slope.abs().max() > 0 or entry["name"] == "gspo"


@pytest.mark.parametrize("rows", [list(range(8)), [4, 5, 6, 7]], ids=["batch", "second"])
def test_trls_rloo_loss_agrees_in_value_and_gradient(toy: Any, rows: list[int]) -> None:
    trainer = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    entry = {"name": "rloo", "ratio": "response", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence_mean"}
    for seed in range(3):
        made = off_policy(toy, seed, spread=0.3)
        want, slope = theirs(made, trainer, rows, leave_one_out())
        got, gradient = ours(made, entry, rows)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, check_dtype=False)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-7)
