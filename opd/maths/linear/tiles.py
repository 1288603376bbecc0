"""The tiled divergence: projection, statistics and gradients of one tile of tokens after the other.

A tile of n tokens is projected into two float32 buffers [n, V] (three with a reference) that every tile reuses, so the
scratch memory is bounded by `scratch_bytes` for any number of tokens. While the logits are there, the gradients of the
tile's weighted sum are taken at once. That makes four matrix products in all (two projections, two gradients);
recomputing the logits in the backward pass would take six. Statistics and gradient of a tile come from `opd.maths.rows`
(torch) or `opd.maths.linear.kernels` (CUDA), which are tested against each other.
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
    """The result of a run over all tiles.

    Attributes:
        statistics: [5, N] in the order of `opd.maths.rows.Statistic`.
        d_hidden: [N, H] gradient of the weighted sum of the divergences, in the dtype of the hidden states; empty if
            not wanted.
        d_head: [V, H] gradient of the head's weight, in the accumulator's dtype; empty if not wanted.
        d_bias: [V] gradient of the head's bias, likewise.
        figures: [7, N] in the order of `opd.maths.diagnostics.TOPK_FIGURES`; [0, N] if not wanted.
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
    """The divergence per token, and the gradients of its weighted sum.

    Args:
        student: hidden states and head that get the gradients; student and teacher have the same V.
        teacher: hidden states and head of the target.
        spec: the divergence.
        temperature: divides the logits of both sides.
        token_weights: [N] weight of each token in the sum that is differentiated, in the accumulator's dtype.
        reference: a reference model; the target is then T^teacher_power R^(1 - teacher_power), normalised.
        teacher_power: lambda of G-OPD; used only with a reference.
        wanted: whether the gradients of hidden states, head and bias are wanted.
        scratch_bytes: bound on the logit buffers in bytes; None for the device's default.
        backend: "torch" or "triton".
        topk: the k of the top-k figures; 0 for none.
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
            # T^power R^(1 - power) need not be normalised here: `fold_` subtracts the log-normaliser of whatever it
            # gets.
            theirs.mul_(teacher_power).add_(spare[0], alpha=1.0 - teacher_power)
        # Before `fold_`, which overwrites the logits.
        for block in row_blocks(ours) if topk else ():
            at = slice(tile.start + block.start, tile.start + block.stop)
            figures[:, at] = topk_rows(ours[block], theirs[block], topk, temperature)
        # All that is constant in a row goes into one factor, applied in a sweep that `fold_` makes anyway.
        factor = token_weights[tile] * (spec.scale * student.head.scale / temperature) if any(wanted) else None
        statistics[:, tile] = fold_(ours, theirs, spec, temperature, soft_cap=student.head.soft_cap, factor=factor)
        if any(wanted):
            # `fold_` has left the gradient in the buffer of the student's logits.
            gradients.add(tile, ours)
    return Tiles(statistics, *gradients.tensors(), figures)


def _kernel(backend: str) -> Callable[..., Tensor]:
    """The backend's implementation of `opd.maths.rows.fold_rows_`, for a whole tile."""
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
