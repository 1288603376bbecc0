"""Gradients of losses on the toy of `benches`, and the verdicts that they come from."""

from typing import Any

import torch
from torch import Tensor

from opd.tasks.verdict import Verdict
from student.plugin.terms import build_terms


def gradient(made: Any, **settings: Any) -> Tensor:
    hidden, _ = made.gradient(build_terms([settings]))
    return hidden


def logp(made: Any) -> Tensor:
    return made.logp(made.hidden.detach(), made.head.detach())


def expectation(made: Any, **settings: Any) -> Tensor:
    """Mean of the gradient over the student's own tokens, by enumeration."""
    p, total = logp(made).exp(), torch.zeros_like(made.hidden)
    for token in range(made.vocab):
        made.token_ids = torch.full_like(made.token_ids, token)
        total += p[:, token, None] * gradient(made, **settings)
    return total


def scores(made: Any) -> Tensor:
    """grad log S(y) with respect to the hidden state of each position."""
    return made.head.detach()[made.token_ids] - logp(made).exp() @ made.head.detach()


def verdicts(made: Any, *values: float | None) -> None:
    for row, value in zip(made.rows, values, strict=True):
        row.verdict = Verdict.unknown("no answer") if value is None else Verdict.score(value)
