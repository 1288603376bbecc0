"""Choose by a score the tokens of each response that a term learns from.

The share is taken within a response, so the choice depends neither on the micro-batch nor on other rows; papers take it
within a batch. Chosen tokens are weighted up for those left out, so that every response keeps its share of the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def top_share(
    score: Float[Tensor, " n"], row: Int[Tensor, " n"], mask: Bool[Tensor, " n"], share: float
) -> tuple[Bool[Tensor, " n"], Float[Tensor, " n"]]:
    """The `share` of each row's unmasked tokens with the highest score, at least one; ties go to the earlier token.

    Args:
        score: [N] any finite numbers where unmasked.
        row: [N] index of the row, constant within a row, ascending.
        mask: [N] tokens to choose from.
        share: in (0, 1].

    Returns:
        [N] bool, the chosen tokens, and [N] float32, unmasked tokens of the row over chosen ones (1 where not chosen).
    """
    import torch

    if len(score) == 0:
        return mask, torch.ones_like(score)
    key = torch.where(mask, score.detach(), -torch.inf)
    # Two stable sorts, by score and then by row, order the tokens of all rows by score at once. `rank` is a token's
    # place within its row: its place in that order minus the start of its row.
    order = torch.argsort(key, descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    lengths = torch.zeros(int(row.max()) + 1, dtype=torch.long, device=row.device).index_add_(
        0, row, torch.ones_like(row)
    )
    starts = lengths.cumsum(0) - lengths
    rank = torch.empty_like(row)
    rank[order] = torch.arange(len(row), device=row.device) - starts[row[order]]
    available = torch.zeros_like(lengths).index_add_(0, row, mask.long())
    # Without the slack, a product such as 0.07 * 100 = 7.000000000000001 would be rounded up by one token too many.
    wanted = torch.ceil(available.double() * share - 1e-9).long().clamp(min=1)
    chosen = mask & (rank < wanted[row])
    factor = (available.double() / wanted.clamp(min=1)).float()[row]
    return chosen, torch.where(chosen, factor, torch.ones_like(factor))


def spread(values: Float[Tensor, " n"], row: Int[Tensor, " n"], mask: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Values scaled to [0, 1] within each row, by its smallest and largest unmasked value; 0 where they are equal."""
    import torch

    rows = int(row.max()) + 1 if len(row) else 0
    clean = torch.where(mask, values.detach(), torch.zeros_like(values))
    low = torch.full((rows,), torch.inf, device=values.device, dtype=values.dtype)
    high = -low
    low = low.scatter_reduce(0, row, torch.where(mask, clean, torch.inf), "amin")
    high = high.scatter_reduce(0, row, torch.where(mask, clean, -torch.inf), "amax")
    width = (high - low)[row]
    scaled = (clean - low[row]) / width.clamp(min=torch.finfo(values.dtype).tiny)
    return torch.where(mask & (width > 0), scaled, torch.zeros_like(scaled))
