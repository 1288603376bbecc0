"""Policy losses against verl's public formulas, written anew here on padded tensors: value and gradient.

verl's package cannot be installed beside ours. Its seq-mean-token-sum-norm divides by the padded length alone and not
by the number of responses, as `constant` does; its log-ratios are clamped at 20, which none here reaches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from off_policy import LENGTHS, LIMIT, REWARDS, off_policy
from torch import Tensor

from student.data.row import CriticValues
from student.learning.objective import Objective
from student.plugin.terms import build_terms
from student.rl.advantages.gae import credit_of

GROUP = {"name": "group_mean"}
PLAIN = {"name": "group_mean", "scale": "none"}


def padded(made: Any, values: Tensor) -> Tensor:
    out = torch.zeros(len(LENGTHS), LIMIT, dtype=torch.float64)
    return out.index_put((made.row, made.position), values.double())


def grpo(normalised: bool = True) -> Tensor:
    scores = torch.tensor(REWARDS, dtype=torch.float64).view(2, 4)
    centred = scores - scores.mean(1, keepdim=True)
    return (centred / (scores.std(1, keepdim=True) + 1e-6) if normalised else centred).flatten()


def leave_one_out() -> Tensor:
    scores = torch.tensor(REWARDS, dtype=torch.float64).view(2, 4)
    return (scores * 4 / 3 - scores.mean(1, keepdim=True) * 4 / 3).flatten()


def aggregate(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    by_row = (losses * mask).sum(1)
    if mode == "seq-mean-token-sum-norm":
        return by_row.sum() / mask.shape[1]
    return (by_row / mask.sum(1)).mean()  # seq-mean-token-mean


def vanilla(now: Tensor, old: Tensor, mask: Tensor, adv: Tensor, low: float, high: float, dual: float) -> Tensor:
    ratio = (now - old).clamp(-20, 20).exp()
    worse = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    return torch.where(adv < 0, torch.minimum(-adv * dual, worse), worse)


def gspo(now: Tensor, old: Tensor, mask: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    whole = ((now - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
    ratio = (now - now.detach() + whole.detach()[:, None]).clamp(max=10.0).exp()
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))


def cispo(now: Tensor, old: Tensor, mask: Tensor, adv: Tensor, high: float) -> Tensor:
    return -adv * (now - old).exp().clamp(max=1 + high).detach() * now


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[dict[str, Any], Loss, Tensor, str, float]] = {
    "ppo with a dual clip": (
        {"name": "grpo", "advantage": GROUP, "aggregation": "token_mean", "dual_clip": 1.3},
        lambda n, o, m, a: vanilla(n, o, m, a, 0.2, 0.2, 1.3),
        grpo(),
        "token-mean",
        1.0,
    ),
    "grpo by response": (
        {"name": "grpo", "advantage": GROUP},
        lambda n, o, m, a: vanilla(n, o, m, a, 0.2, 0.2, 1e9),
        grpo(),
        "seq-mean-token-mean",
        1.0,
    ),
    "dapo": (
        {"name": "dapo", "advantage": GROUP, "dual_clip": 10.0},
        lambda n, o, m, a: vanilla(n, o, m, a, 0.2, 0.28, 10.0),
        grpo(),
        "token-mean",
        1.0,
    ),
    "dr. grpo": (
        {"name": "dr_grpo", "advantage": PLAIN},
        lambda n, o, m, a: vanilla(n, o, m, a, 0.2, 0.2, 1e9),
        grpo(normalised=False),
        "seq-mean-token-sum-norm",
        1.0 / len(LENGTHS),
    ),
    "gspo": (
        {"name": "gspo", "advantage": GROUP, "clip_low": 0.05, "clip_high": 0.05},
        lambda n, o, m, a: gspo(n, o, m, a, 0.05, 0.05),
        grpo(),
        "seq-mean-token-mean",
        1.0,
    ),
    "cispo": (
        {"name": "cispo", "advantage": GROUP, "cap": 1.2},
        lambda n, o, m, a: cispo(n, o, m, a, 0.2),
        grpo(),
        "token-mean",
        1.0,
    ),
    "gpg with rloo": (
        {"name": "policy_gradient", "advantage": {"name": "leave_one_out"}, "ratio": "none"},
        lambda n, o, m, a: -a * n,
        leave_one_out(),
        "token-mean",
        1.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_verls_losses_agree_in_value_and_gradient(toy: Any, case: str, seed: int) -> None:
    entry, loss, advantage, mode, factor = CASES[case]
    made = off_policy(toy, seed, spread=0.4)
    made.hidden = made.hidden.detach().clone().requires_grad_()
    live = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    mask = padded(made, torch.from_numpy(np.concatenate([row.loss_mask for row in made.rows])))
    now, old = padded(made, live), padded(made, made.behaviour.nan_to_num())
    want = factor * aggregate(loss(now, old, mask, advantage[:, None].expand_as(mask)), mask, mode)
    (slope,) = torch.autograd.grad(want, made.hidden)

    objective = Objective(build_terms([entry]), length_limit=LIMIT)
    made.hidden = made.hidden.detach().clone().requires_grad_()
    objective.prepare(made.rows)
    got, _ = objective.loss(made.batch(), objective.position_weights(made.rows, torch.device("cpu")))
    got.backward()
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-7, check_dtype=False)
    torch.testing.assert_close(made.hidden.grad, slope, rtol=1e-5, atol=1e-7)
    assert slope.abs().max() > 0


def test_verls_gae_agrees_before_it_whitens(toy: Any) -> None:
    made = toy(lengths=(6,), group=1)
    (row,) = made.rows
    values = np.linspace(0.2, 0.9, 6).astype(np.float32)
    row.critic = CriticValues(values)
    gamma, lam, mask = 0.97, 0.9, row.loss_mask
    reward = np.zeros(6)
    reward[np.flatnonzero(mask)[-1]] = 1.0
    later, after, found = 0.0, 0.0, np.zeros(6)
    for t in reversed(range(6)):
        delta = reward[t] + gamma * after - values[t]
        step = delta + gamma * lam * later
        # Masked positions hand on what comes behind them.
        after = values[t] * mask[t] + (1 - mask[t]) * after
        later = step * mask[t] + (1 - mask[t]) * later
        found[t] = later
    np.testing.assert_allclose(credit_of(row, 1.0, gamma, lam), np.where(mask, found, 0.0), rtol=1e-5)
