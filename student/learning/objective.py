"""The objective: a weighted sum of terms, each a weighted average over the tokens of an update.

The weights are computed from all rows of the update on all ranks before the first backward pass, so the gradient does
not depend on how rows are split into micro-batches or spread over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opd.errors import PluginError
from student.data.needs import Needs, merge
from student.data.outcome import Outcome
from student.data.report import StepReport
from student.data.row import Row
from student.data.schedule import WeightSchedule
from student.data.token_batch import TokenBatch
from student.learning.aggregation import position_weights, positions_of
from student.plugin.terms import Term, TermOutput, losses_of, metric_names
from student.state.named_states import load_states, names_of, states_of

if TYPE_CHECKING:
    from student.model.model import Student

Metrics = dict[str, tuple[float, float]]
N = TypeVar("N", float, Tensor | float)
Sums = dict[str, tuple[Tensor | float, Tensor | float]]
"""Metrics that are still on the device: reading a number makes the host wait for all kernels queued before it."""


class Objective:
    """A weighted sum of terms.

    Args:
        terms: the terms.
        length_limit: response tokens per row that the `constant` aggregation divides by.

    Attributes:
        step: the current step, by which scheduled weights are looked up.
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

    def shown(self) -> dict[str, tuple[str, ...]]:
        """What the terms show first: by label, the names that the metric may have; see `Traits.shown`."""
        figures: dict[str, tuple[str, ...]] = {}
        for term in self.terms:
            for metric, label in term.traits.shown.items():
                shared = label in figures or (metric == "loss" and len(self.terms) > 1)
                figures[f"{label} of {term.label}" if shared else label] = metric_names(term, metric)
        return figures

    @property
    def recomputes(self) -> bool:
        """Whether a term needs old log-probs under the weights that each update starts from."""
        return any(term.traits.recomputes for term in self.terms)

    def modules(self, student: Student) -> dict[str, tuple[nn.Module, float]]:
        """Parameters of the terms' own, by the name of the term, with learning rates; see `Term.module`."""
        modules = {}
        for name, term in zip(names_of(self.terms), self.terms, strict=True):
            module = term.module(student)
            if module is not None:
                modules[name.replace(".", "/")] = module  # torch refuses a dot in the name of a module
        return modules

    def bind(self, tokenizer: Any) -> None:
        """Show each term the student's tokenizer."""
        for term in self.terms:
            term.bind(tokenizer)

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Let each term look at the whole batch of the step; see `Term.assess`."""
        for term in self.terms:
            term.assess(rows, outcomes, places)
        self._strata = [term.settings.strata_of(outcomes) for term in self.terms]

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
        """For each term, the weight of every response position, row after row; 0 where the term does not train.

        Denominators are counted over the rows of all ranks, in `opd.maths.token_weights` and nowhere else.
        """
        return position_weights(self.terms, self._strata, rows, self.length_limit, device)

    def loss(self, batch: TokenBatch, weights: Sequence[Float[Tensor, " n"]]) -> tuple[Float[Tensor, ""], Sums]:
        """This micro-batch's share of the update's loss, nats, and its metrics as (numerator, denominator).

        Args:
            batch: the micro-batch.
            weights: for each term, the weights of the batch's positions, taken from `position_weights`.
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
            # Applied outside the metric loss/NAME, which so stays comparable while a scheduled weight changes.
            if isinstance(weight, WeightSchedule):
                weight = weight.at(self.step)
                metrics[f"weight/{label}"] = (weight, 1.0)
            total = total + weight * part
            metrics[f"loss/{label}"] = (part.detach().double(), 1.0)
            for key, (top, bottom) in output.metrics.items():
                # A repeated term always prefixes its metrics: a name must not depend on what a micro-batch contains.
                metrics[f"{label}/{key}" if term.repeats or key in metrics else key] = (_exact(top), _exact(bottom))
        return total, metrics

    def state_dict(self) -> dict[str, Any]:
        """State of every term, by its name."""
        return states_of(self.terms)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        load_states(self.terms, state, "objective")


def add(sums: Mapping[str, tuple[N, N]], other: Mapping[str, tuple[N, N]]) -> dict[str, tuple[N, N]]:
    """Add the sums of two micro-batches or ranks; loss/ entries are shares of one sum, so their denominator stays 1."""
    total = dict(sums)
    for name, (top, bottom) in other.items():
        old = total.get(name, (0.0, 0.0))
        total[name] = (old[0] + top, 1.0 if name.startswith("loss/") else old[1] + bottom)
    return total


def of_the_step(total: Metrics, ranks: int) -> Metrics:
    """Divide losses summed over ranks by the number of ranks; all other metrics stay as they are.

    Position weights contain a factor of the number of ranks, because gradients are averaged over ranks.
    """
    return {name: (top / ranks if name.startswith("loss/") else top, bottom) for name, (top, bottom) in total.items()}


def quotients(sums: Metrics) -> dict[str, float]:
    """Each metric's numerator over its denominator; metrics that measured nothing are left out."""
    return {name: top / bottom for name, (top, bottom) in sums.items() if bottom}


def to_host(sums: Sums) -> Metrics:
    """The metrics as floats, moved from the device in one copy."""
    waiting = [value for pair in sums.values() for value in pair if isinstance(value, Tensor)]
    numbers = iter(torch.stack(waiting).tolist() if waiting else ())

    def read(value: Tensor | float) -> float:
        return float(next(numbers)) if isinstance(value, Tensor) else float(value)

    return {name: (read(top), read(bottom)) for name, (top, bottom) in sums.items()}


def _exact(value: Tensor | float) -> Tensor | float:
    """`value` detached and in float64, the precision in which the host sums."""
    return value.detach().double() if isinstance(value, Tensor) else value


def _weighted(output: TermOutput, batch: TokenBatch) -> Float[Tensor, ""]:
    if output.total is not None:
        return output.total
    if output.loss is None:
        raise PluginError("a term returned neither loss nor total; a TermOutput must have one of them.")
    # where() instead of a product, so that a NaN at a masked position does not reach the sum.
    return (torch.where(batch.mask, output.loss, torch.zeros_like(output.loss)) * batch.weights).sum()
