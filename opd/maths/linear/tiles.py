"""The tiled divergence between hidden states times heads: projection, statistics and gradients per tile of tokens.

A tile of n tokens is projected into two float32 buffers [n, V] that are reused for every tile, so scratch is fixed by
`scratch_bytes` at any number of tokens. While the logits are there, the gradients of the weighted sum of the tile are
taken at once: four matrix products in all (two projections, two gradients) where recomputing in the backward pass costs
six. Statistics and gradient of a tile come from `opd.maths.rows` (torch) or `opd.maths.linear.kernels` (CUDA), which
are tested against each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.blocks import row_blocks
from opd.maths.diagnostics import TOPK_FIGURES, topk_rows
from opd.maths.linear.gradients import gradients_within
from opd.maths.linear.project import Projection, tiles_of
from opd.maths.pointwise import Spec
from opd.maths.rows import Statistic, fold_rows_


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """What a run over all tiles yields.

    Attributes:
        statistics: [5, N] in the order of `opd.maths.rows.Statistic`.
        d_hidden: [N, H] gradient of the weighted sum of the divergences, dtype of the hidden states; empty when not
            wanted.
        d_head: [V, H] likewise, accumulator dtype.
        d_bias: [V] likewise.
        figures: [7, N] in the order of `opd.maths.diagnostics.TOPK_FIGURES`, [0, N] when not wanted.
    """

    statistics: Float[Tensor, "5 N"]
    d_hidden: Tensor
    d_head: Tensor
    d_bias: Tensor
    figures: Float[Tensor, "F N"]


def run_tiles(
    student: Projection,
    teacher: Projection,
    spec: Spec,
    temperature: float,
    token_weights: Float[Tensor, " N"],
    *,
    reference: Projection | None = None,
    teacher_power: float = 1.0,
    wanted: tuple[bool, bool, bool] = (False, False, False),
    scratch_bytes: int | None = None,
    backend: str = "torch",
    topk: int = 0,
) -> Tiles:
    """Divergence per token and the gradients of its weighted sum.

    Args:
        student: hidden states and head whose gradients are wanted; both sides of the same V.
        teacher: the target.
        spec: the divergence.
        temperature: divides the logits of both sides.
        token_weights: [N], the weight of each token in the sum that is differentiated; accumulator dtype.
        reference: with it the target is T^power R^(1 - power), normalised.
        teacher_power: that power, lambda of G-OPD.
        wanted: whether gradients of hidden states, head and bias are wanted.
        scratch_bytes: bound on the logit buffers; None for the device's default.
        backend: "torch" or "triton".
        topk: size of the top k whose figures are wanted, 0 for none.
    """
    fold_ = _kernel(backend)
    statistics = torch.empty(len(Statistic), len(student.hidden), dtype=student.dtype, device=student.hidden.device)
    figures = statistics.new_empty(len(TOPK_FIGURES) if topk else 0, len(student.hidden))
    gradients, scratch = gradients_within(student, wanted, scratch_bytes)
    for tile, (ours, theirs, *spare) in tiles_of(student, 2 if reference is None else 3, scratch):
        student.write(tile, ours)
        teacher.write(tile, theirs)
        if reference is not None:
            reference.write(tile, spare[0])
            # T^power R^(1 - power) need not be normalised here: folding subtracts the log-normaliser of what it is
            # given.
            theirs.mul_(teacher_power).add_(spare[0], alpha=1.0 - teacher_power)
        # Before the fold, which works in place.
        for block in row_blocks(ours) if topk else ():
            at = slice(tile.start + block.start, tile.start + block.stop)
            figures[:, at] = topk_rows(ours[block], theirs[block], topk, temperature)
        # All that is constant in a row goes into one factor, which the fold applies in the sweep that it makes anyway.
        factor = token_weights[tile] * (spec.scale * student.head.scale / temperature) if any(wanted) else None
        statistics[:, tile] = fold_(ours, theirs, spec, temperature, soft_cap=student.head.soft_cap, factor=factor)
        if any(wanted):
            # The fold has left the gradient in the buffer of the student's logits.
            gradients.add(tile, ours)
    return Tiles(statistics, *gradients.tensors(), figures)


def _kernel(backend: str) -> Callable[..., Tensor]:
    """`opd.maths.rows.fold_rows_` for a whole tile, by the backend."""
    if backend == "triton":
        from opd.maths.linear import kernels

        return kernels.fold_
    return fold_tile_


def fold_tile_(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    spec: Spec,
    temperature: float,
    *,
    soft_cap: float = 0.0,
    factor: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "5 n"]:
    """`fold_rows_` over the blocks of a tile."""
    statistics = torch.empty(len(Statistic), len(student), dtype=student.dtype, device=student.device)
    for block in row_blocks(student):
        part = None if factor is None else factor[block]
        found = fold_rows_(student[block], teacher[block], spec, temperature, soft_cap=soft_cap, factor=part)
        statistics[:, block] = found
    return statistics
