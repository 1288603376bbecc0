"""EntroPIC where it holds an entropy and where not, by exact gradients over all answers of a tiny policy.

Answers are three tokens of three. Every step is an update by the exact gradient over answers and verdicts, on policy,
so that nothing here is a matter of samples.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from student.data.report import StepReport
from student.plugin.terms import build_terms

LENGTH, VOCABULARY, STEPS = 3, 3, 200
ANSWERS = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
GOOD = (ANSWERS == 0).double().mean(1)
"""The share of good tokens in each answer."""
LITTLE = 0.4 + 0.2 * GOOD
"""Chances of success where a token decides little: each good one adds a fifteenth."""
ALL = GOOD
"""Where it decides all that it can: an answer without good tokens never succeeds, one of good tokens always."""


def train(chances: torch.Tensor, start: float, **entry: Any) -> tuple[list[float], Any]:
    """Mean entropy before each update from logits of `start` for good tokens and 0 for others, and the term."""
    (term,) = build_terms([entry])
    logits = torch.zeros(LENGTH, VOCABULARY, dtype=torch.float64)
    logits[:, 0] = start
    everything = SimpleNamespace(mask=torch.ones(ANSWERS.numel(), dtype=torch.bool))
    found = []
    for step in range(STEPS):
        logits = logits.detach().requires_grad_()
        logp = logits.log_softmax(1)
        live = logp[torch.arange(LENGTH), ANSWERS]
        weight = live.detach().sum(1).exp()
        mean = (weight * chances).sum()
        deviation = (mean * (1 - mean)).sqrt() + 1e-6
        loss = torch.zeros((), dtype=torch.float64)
        for reward, share in ((1.0, chances), (0.0, 1 - chances)):
            credit = ((reward - mean) / deviation).expand(live.numel())
            output = term.surrogate(live.flatten() - live.detach().flatten(), credit, live.flatten(), everything)
            loss = loss + (output.loss.view_as(live).mean(1) * weight * share).sum()
        (slope,) = torch.autograd.grad(loss, logits)
        logits = logits - 20.0 * slope
        found.append(float(-(logp.exp() * logp).detach().sum(1).mean()))
        term.observe(StepReport(step, {"student_entropy": found[-1]}, []))
    return found, term


@pytest.mark.parametrize("start", [1.5, 6.0], ids=["from above", "from below"])
def test_a_set_entropy_is_held_where_a_token_decides_little(start: float) -> None:
    found, term = train(LITTLE, start, name="entropic", target=0.2, k_p=5.0, k_i=0.1)
    assert found[0] > 0.8 if start == 1.5 else found[0] < 0.04
    assert found[-40:] == pytest.approx([0.2] * 40, rel=0.03)
    # What a wrong token costs, a fifteenth, over twice the variance of the success rate, near 0.6 * 0.4.
    assert term.alpha == pytest.approx(-(1 / 15) / 0.48, rel=0.05)


def test_without_the_controller_the_entropy_falls_there() -> None:
    found, _ = train(LITTLE, 1.5, name="grpo")
    assert found[-1] < 0.04


def test_no_weight_holds_an_entropy_where_a_token_decides_all() -> None:
    found, term = train(ALL, 1.5, name="entropic", target=0.2, k_p=50.0)
    assert term.alpha == -1.0 and found[-1] < 0.002
