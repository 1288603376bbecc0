"""The objective: a sum of terms, each an average with weights that the whole step shares.

Weights are counted over all rows of the step on all ranks before the first backward, so the gradient does not
depend on how rows are cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opd.errors import PluginError
from student.controllers import StepReport
from student.data.outcome import Outcome
from student.data.row import Row
from student.learning.aggregation import position_weights, positions_of
from student.learning.schedule import WeightSchedule
from student.learning.terms import Term, TermOutput, TokenBatch, losses_of
from student.scoring.needs import Needs, merge

if TYPE_CHECKING:
    from student.learning.hooks import ModelHook
    from student.learning.model import Student

Metrics = dict[str, tuple[float, float]]
N = TypeVar("N", float, Tensor | float)
Sums = dict[str, tuple[Tensor | float, Tensor | float]]
"""Metrics that are still on the device: reading one number would make the host wait for all kernels before it."""


class Objective:
    """A weighted sum of terms.

    Args:
        terms: the terms.
        length_limit: response tokens per row that the `constant` aggregation divides by.

    Attributes:
        step: of the update, which schedules of weights go by.
    """

    def __init__(self, terms: Sequence[Term], length_limit: int) -> None:
        self.terms = list(terms)
        self.length_limit = length_limit
        names = [term.settings.name.rpartition(":")[2] for term in self.terms]
        for i, (term, name) in enumerate(zip(self.terms, names, strict=True)):
            term.label = name if names.count(name) == 1 else f"{name}.{i}"
            term.repeats = name in names[:i]
        self._strata: list[list[str]] = [[] for _ in self.terms]
        self.step = 0

    def needs(self) -> Needs:
        """What all terms together need."""
        return merge(term.needs() for term in self.terms)

    @property
    def recomputes(self) -> bool:
        """Whether a term wants old log-probs to be those of the weights that each update starts from."""
        return any(term.recomputes for term in self.terms)

    def modules(self, student: Student) -> dict[str, tuple[nn.Module, float]]:
        """Weights of the terms' own by position, with their learning rates; see `Term.module`."""
        found = {str(i): term.module(student) for i, term in enumerate(self.terms)}
        return {place: module for place, module in found.items() if module is not None}

    def hooks(self) -> list[ModelHook]:
        """Those of all terms; see `Term.hooks`."""
        return [hook for term in self.terms for hook in term.hooks()]

    def bind(self, tokenizer: Any) -> None:
        """Show each term the student's tokenizer."""
        for term in self.terms:
            term.bind(tokenizer)

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Let each term look at the whole batch of the step; see `Term.assess`."""
        for term in self.terms:
            term.assess(rows, outcomes, places)
        self._strata = [term.strata(outcomes) for term in self.terms]

    def prepare(self, rows: Sequence[Row]) -> None:
        """Let each term look at this rank's rows of an update."""
        for term in self.terms:
            term.prepare(rows)

    def observe(self, report: StepReport) -> None:
        """Let each term learn from the finished step."""
        for term in self.terms:
            term.observe(report)

    def selects_any(self, rows: Sequence[Row]) -> bool:
        """Whether any term learns from any of `rows`, after `prepare`."""
        return any(term.selects(row) for term in self.terms for row in rows)

    def position_weights(self, rows: Sequence[Row], device: torch.device) -> list[Float[Tensor, " N"]]:
        """Per term the weight of every response position of the step, row after row; 0 where it is not trained.

        Counted over all rows on all ranks by `opd.maths.token_weights`, the one place that divides.
        """
        return position_weights(self.terms, self._strata, rows, self.length_limit, device)

    def loss(self, batch: TokenBatch, weights: Sequence[Float[Tensor, " n"]]) -> tuple[Float[Tensor, ""], Sums]:
        """This micro-batch's share of the step's loss in nats, and its metrics as sums with denominators.

        Args:
            batch: the micro-batch.
            weights: per term, of the batch's positions, from `position_weights`.
        """
        total = torch.zeros((), device=batch.mask.device)
        metrics: Sums = {}
        for term, given in zip(self.terms, weights, strict=True):
            label = term.label
            # Each term sees the batch with its own mask and weights: two terms may learn from different rows.
            mask = batch.mask & batch.of_rows([term.selects(r) for r in batch.rows])
            if term.settings.first_turns is not None:
                mask = mask & positions_of(term, batch.rows).to(mask.device)
            mine = dataclasses.replace(batch, mask=mask, weights=given * mask)
            output = losses_of(term, mine)
            part = _weighted(output, mine)
            weight = term.settings.weight
            # Outside the loss of the term, so that loss/NAME stays comparable while its weight moves.
            if isinstance(weight, WeightSchedule):
                weight = weight.at(self.step)
                metrics[f"weight/{label}"] = (weight, 1.0)
            total = total + weight * part
            metrics[f"loss/{label}"] = (part.detach().double(), 1.0)
            for key, (top, bottom) in output.metrics.items():
                # A metric that a micro-batch may lack must not change its name with it, so a repeated term has its own.
                metrics[f"{label}/{key}" if term.repeats or key in metrics else key] = (_exact(top), _exact(bottom))
        return total, metrics

    def state_dict(self) -> dict[str, Any]:
        """State of every term, by position."""
        return {str(i): term.state_dict() for i, term in enumerate(self.terms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for i, term in enumerate(self.terms):
            term.load_state_dict(state.get(str(i), {}))


def add(one: Mapping[str, tuple[N, N]], other: Mapping[str, tuple[N, N]]) -> dict[str, tuple[N, N]]:
    """Sums of two micro-batches or ranks together: losses are shares of a sum, every other metric a ratio of sums."""
    total = dict(one)
    for name, (top, bottom) in other.items():
        old = total.get(name, (0.0, 0.0))
        total[name] = (old[0] + top, 1.0 if name.startswith("loss/") else old[1] + bottom)
    return total


def of_the_step(total: Metrics, ranks: int) -> Metrics:
    """The losses of a step from their sums over ranks.

    Weights are multiplied by the number of ranks, because gradients are averaged over them; so are the sums.
    """
    return {name: (top / ranks if name.startswith("loss/") else top, bottom) for name, (top, bottom) in total.items()}


def to_host(sums: Sums) -> Metrics:
    """The numbers, in one copy from the device."""
    waiting = [value for pair in sums.values() for value in pair if isinstance(value, Tensor)]
    numbers = iter(torch.stack(waiting).tolist() if waiting else ())

    def read(value: Tensor | float) -> float:
        return float(next(numbers)) if isinstance(value, Tensor) else float(value)

    return {name: (read(top), read(bottom)) for name, (top, bottom) in sums.items()}


def _exact(value: Tensor | float) -> Tensor | float:
    """In float64, which the host sums in too."""
    return value.detach().double() if isinstance(value, Tensor) else value


def _weighted(output: TermOutput, batch: TokenBatch) -> Float[Tensor, ""]:
    if output.total is not None:
        return output.total
    if output.loss is None:
        raise PluginError("A term returned neither loss nor total; a TermOutput has one of them.")
    # where() and not a product: a NaN at a masked position must not reach the sum.
    return (torch.where(batch.mask, output.loss, torch.zeros_like(output.loss)) * batch.weights).sum()
