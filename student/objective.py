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

from student.needs import Needs, merge
from student.row import Row
from student.terms import Term, TermOutput, TokenBatch

Metrics = dict[str, tuple[float, float]]


class Objective:
    """A weighted sum of terms.

    Args:
        terms: the terms.
        length_limit: response tokens per row that the `constant` aggregation divides by.
    """

    def __init__(self, terms: Sequence[Term], length_limit: int) -> None:
        self.terms = list(terms)
        self.length_limit = length_limit
        names = [term.settings.name.rpartition(":")[2] for term in self.terms]
        self._labels = [name if names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(names)]

    def needs(self) -> Needs:
        """What all terms together need."""
        return merge(term.needs() for term in self.terms)

    def bind(self, tokenizer: Any) -> None:
        """Show each term the student's tokenizer."""
        for term in self.terms:
            term.bind(tokenizer)

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
        counts = []
        for term in self.terms:
            lengths = [int(row.loss_mask.sum()) for row in rows if term.selects(row)]
            counts.append([float(sum(lengths)), float(sum(length > 0 for length in lengths))])
        total = reduce(torch.tensor(counts, dtype=torch.float64)).tolist()
        denominators = []
        for term, (tokens, trained) in zip(self.terms, total, strict=True):
            by_name = {"token_mean": tokens, "sequence_mean": trained, "constant": trained * self.length_limit}
            denominators.append(max(1.0, by_name[term.settings.aggregation]))
        return denominators

    def loss(self, batch: TokenBatch, denominators: Sequence[float]) -> tuple[Float[Tensor, ""], Metrics]:
        """This micro-batch's share of the step's loss in nats, and its metrics as sums with denominators."""
        total = torch.zeros((), device=batch.mask.device)
        metrics: Metrics = {}
        for term, label, denominator in zip(self.terms, self._labels, denominators, strict=True):
            mine = dataclasses.replace(batch, mask=batch.mask & batch.of_rows([term.selects(r) for r in batch.rows]))
            weights = _position_weights(mine, term.settings.aggregation) / denominator
            output = term.token_losses(dataclasses.replace(mine, weights=weights))
            part = _weighted(output, mine, weights)
            total = total + term.settings.weight * part
            metrics[f"loss/{label}"] = (float(part.detach()), 1.0)
            for key, (top, bottom) in output.metrics.items():
                metrics[f"{label}/{key}" if key in metrics else key] = (float(top), float(bottom))
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
    per_row = [row.weight for row in batch.rows]
    if aggregation == "sequence_mean":
        per_row = [row.weight / max(1, int(row.loss_mask.sum())) for row in batch.rows]
    return batch.mask.float() * batch.of_rows(per_row)


def _weighted(output: TermOutput, batch: TokenBatch, weights: Tensor) -> Float[Tensor, ""]:
    if output.total is not None:
        return output.total
    if output.loss is None:
        raise TypeError("a term returned neither loss nor total")
    # where() and not a product: a NaN at a masked position must not reach the sum.
    return (torch.where(batch.mask, output.loss, torch.zeros_like(output.loss)) * weights).sum()
