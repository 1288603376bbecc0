"""Importance ratios of response tokens at the grain that a loss wants, as logarithms in nats, 0 where masked.

    token      rho_t
    turn       the geometric mean of rho over the tokens of the turn, on each of them
    sequence   the geometric mean of rho over the tokens of the row, on each of them
    response   the product of rho over the tokens of the row, on each of them
    prefix     rho_1 ... rho_t, the probability ratio of the response up to t

Masked tokens (the environment's, for example) count in no mean and no product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from student.data.token_batch import TokenBatch

Ratio: TypeAlias = Literal["token", "turn", "sequence", "response", "prefix", "none"]


def at_grain(log_ratio: Float[Tensor, " n"], batch: TokenBatch, grain: Ratio) -> Float[Tensor, " n"]:
    """[N] log-ratios at another grain, from those of tokens [N] (0 where masked); differentiable."""
    if grain == "sequence":
        return _mean_over(log_ratio, batch, batch.row, len(batch.rows))
    if grain == "response":
        # Summed in log space: a product of a thousand ratios would overflow or underflow before it is clipped.
        zeros = log_ratio.new_zeros(len(batch.rows))
        return zeros.index_add(0, batch.row, log_ratio)[batch.row]
    if grain == "turn":
        index, count = turn_index(batch)
        return _mean_over(log_ratio, batch, index, count)
    return prefix_sum(log_ratio, batch) if grain == "prefix" else log_ratio


def _mean_over(values: Float[Tensor, " n"], batch: TokenBatch, index: Int[Tensor, " n"], count: int) -> Tensor:
    import torch

    zeros = torch.zeros(count, dtype=values.dtype, device=values.device)
    total = zeros.index_add(0, index, values)
    length = zeros.index_add(0, index, batch.mask.to(values.dtype))
    # A row without trained tokens has the sum 0 and the length 0.
    return (total / length.clamp(min=1.0))[index]


def turn_index(batch: TokenBatch) -> tuple[Int[Tensor, " n"], int]:
    """[N] index of each position's turn, counted over the micro-batch, and the number of turns.

    See `student.learning.aggregation.turn_numbers`.
    """
    import torch

    from student.learning.aggregation import turn_numbers

    found, count = turn_numbers(batch.rows)
    return torch.from_numpy(found).to(batch.mask.device), count


def turn_in_row(batch: TokenBatch) -> Int[Tensor, " n"]:
    """[N] index of each position's turn within its row, from 0, divided as in `turn_index`."""
    import torch

    index, _ = turn_index(batch)
    sizes = [max(1, len(row.turns)) for row in batch.rows]
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    return index - torch.tensor(firsts, device=index.device)[batch.row]


def prefix_sum(values: Float[Tensor, " n"], batch: TokenBatch) -> Float[Tensor, " n"]:
    """[N] the sum over the positions of the row up to and including each."""
    padded = in_rows(values, batch, 0.0).cumsum(1)
    return padded[batch.row, batch.position]


def least_before(values: Float[Tensor, " n"], batch: TokenBatch) -> Float[Tensor, " n"]:
    """[N] the minimum over the trained positions of the row before each; 0 at the first of them."""
    import torch

    # Infinity stands for no position yet; 0 would act as a ratio of 1, and win against ratios above 1.
    shown = torch.where(batch.mask, values, torch.full_like(values, torch.inf))
    least = in_rows(shown, batch, torch.inf).cummin(1).values
    before = torch.cat([torch.full_like(least[:, :1], torch.inf), least[:, :-1]], 1)[batch.row, batch.position]
    return torch.where(before.isinf(), torch.zeros_like(before), before)


def in_rows(values: Float[Tensor, " n"], batch: TokenBatch, fill: float) -> Float[Tensor, "r t"]:
    """[R, T] the values [N] laid out by row and position, padded with `fill`."""
    longest = max(row.length for row in batch.rows)
    padded = values.new_full((len(batch.rows), longest), fill)
    return padded.index_put((batch.row, batch.position), values)
