"""Gradients of losses on the toy of `benches`, and the verdicts that they come from."""

from typing import Any

from torch import Tensor

from opd.tasks.verdict import Verdict
from student.plugin.terms import build_terms


def gradient(made: Any, **settings: Any) -> Tensor:
    hidden, _ = made.gradient(build_terms([settings]))
    return hidden


def scores(made: Any) -> Tensor:
    """grad log S(y) with respect to the hidden state of each position."""
    p = made.logp(made.hidden.detach(), made.head.detach()).exp()
    return made.head.detach()[made.token_ids] - p @ made.head.detach()


def verdicts(made: Any, *values: float | None) -> None:
    for row, value in zip(made.rows, values, strict=True):
        row.verdict = Verdict.unknown("no answer") if value is None else Verdict.score(value)
