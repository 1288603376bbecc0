"""The objective: a sum of terms, each averaged by a denominator that the whole step shares.

Denominators are counted over all rows of the step on all ranks before the first backward, so the gradient does not
depend on how rows are cut into micro-batches or spread over ranks.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from opd.config import parse_settings
from opd.errors import ConfigError
from student.needs import Needs, merge
from student.row import Row
from student.terms import OBJECTIVES, Term, TermOutput, TokenBatch

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
Metrics = dict[str, tuple[float, float]]


def build_terms(entries: Sequence[Mapping[str, Any]]) -> list[Term]:
    """Terms from the `objective` entries of a recipe.

    Raises:
        ConfigError: for an unknown name, key or value.
    """
    import student.methods
    import student.rl  # noqa: F401  (registers the names)

    terms: list[Term] = []
    for index, entry in enumerate(entries):
        if "name" not in entry:
            raise ConfigError(f"objective.{index} has no name; see `opd plugins list`.")
        cls: type[Term] = OBJECTIVES.load(str(entry["name"]))
        term = cls(parse_settings(cls.settings_type, entry, source=f"objective.{index}"))
        if term.settings.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"objective.{index}.aggregation is {term.settings.aggregation!r}; use one of {', '.join(AGGREGATIONS)}."
            )
        terms.append(term)
    return terms


class Objective:
    """A weighted sum of terms.

    Args:
        terms: the terms.
        length_limit: response tokens per row that the `constant` aggregation divides by.
    """

    def __init__(self, terms: Sequence[Term], length_limit: int) -> None:
        self.terms = list(terms)
        self.length_limit = length_limit

    def needs(self) -> Needs:
        """What all terms together need."""
        return merge(term.needs() for term in self.terms)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Let each term look at all rows of the step."""
        for term in self.terms:
            term.prepare(rows)

    def denominators(self, rows: Sequence[Row], reduce: Callable[[Tensor], Tensor]) -> list[float]:
        """One denominator per term, over all ranks.

        Args:
            rows: this rank's rows of the step.
            reduce: sums a tensor over ranks.
        """
        tokens = float(sum(int(row.loss_mask.sum()) for row in rows))
        trained = float(sum(bool(row.loss_mask.any()) for row in rows))
        total = reduce(torch.tensor([tokens, trained], dtype=torch.float64)).tolist()
        by_name = {"token_mean": total[0], "sequence_mean": total[1], "constant": total[1] * self.length_limit}
        return [max(1.0, by_name[term.settings.aggregation]) for term in self.terms]

    def loss(self, batch: TokenBatch, denominators: Sequence[float]) -> tuple[Float[Tensor, ""], Metrics]:
        """This micro-batch's share of the step's loss in nats, and its metrics as sums with denominators."""
        total = torch.zeros((), device=batch.mask.device)
        metrics: Metrics = {}
        for term, denominator in zip(self.terms, denominators, strict=True):
            weights = _position_weights(batch, term.settings.aggregation) / denominator
            output = term.token_losses(dataclasses.replace(batch, weights=weights))
            part = _weighted(output, batch, weights)
            total = total + term.settings.weight * part
            name = term.settings.name.rpartition(":")[2]
            metrics[f"loss/{name}"] = (float(part.detach()), 1.0)
            metrics |= {key: (float(top), float(bottom)) for key, (top, bottom) in output.metrics.items()}
        return total, metrics

    def state_dict(self) -> dict[str, Any]:
        """State of every term, by position."""
        return {str(i): term.state_dict() for i, term in enumerate(self.terms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for i, term in enumerate(self.terms):
            term.load_state_dict(state.get(str(i), {}))


def _position_weights(batch: TokenBatch, aggregation: str) -> Float[Tensor, " n"]:
    """[N] weights before the division by the denominator: mask, row weight, and 1 / length for sequence_mean."""
    per_row = torch.tensor([row.weight for row in batch.rows], device=batch.mask.device)
    if aggregation == "sequence_mean":
        lengths = [max(1, int(row.loss_mask.sum())) for row in batch.rows]
        per_row = per_row / torch.tensor(lengths, device=batch.mask.device)
    return batch.mask.float() * per_row[batch.row]


def _weighted(output: TermOutput, batch: TokenBatch, weights: Tensor) -> Float[Tensor, ""]:
    if output.total is not None:
        return output.total
    if output.loss is None:
        raise TypeError("a term returned neither loss nor total")
    # where() and not a product: a NaN at a masked position must not reach the sum.
    return (torch.where(batch.mask, output.loss, torch.zeros_like(output.loss)) * weights).sum()
