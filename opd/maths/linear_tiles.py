"""The tiled divergence between hidden states times heads: projection, statistics and gradients per tile of tokens.

A tile of n tokens is projected into two float32 buffers [n, V] that are reused for every tile, so scratch is fixed by
`scratch_bytes` at any number of tokens. While the logits are there, the gradients of the weighted sum of the tile are
taken at once: four matrix products in all (two projections, two gradients) where recomputing in the backward pass costs
six. Statistics and gradient of a tile come from `opd.maths.rows` (torch) or `opd.maths.linear_triton` (CUDA), which are
tested against each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from opd.maths.blocks import row_blocks
from opd.maths.diagnostics import TOPK_FIGURES, topk_rows
from opd.maths.pointwise import Spec
from opd.maths.rows import Row, fold_rows_

#: Default scratch of the tiles, bytes.
CPU_SCRATCH, GPU_SCRATCH = 128 << 20, 1 << 30
#: Vocabulary entries per step where a head or a gradient must be cast or accumulated through a temporary.
_VOCABULARY_STEP = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One model's end: logits = soft_cap * tanh(scale * (head @ hidden + bias) / soft_cap).

    Attributes:
        hidden: [N, H] after the final norm.
        head: [V, H].
        bias: [V] or None.
        scale: logit scale.
        soft_cap: 0 for none.
    """

    hidden: Float[Tensor, "N H"]
    head: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    soft_cap: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and gradients: float32, or float64 for float64 hidden states."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def through_cap_(self, gradient: Tensor, logits: Tensor) -> None:
        """Takes a gradient on the capped logits back through the soft-cap, in place."""
        if self.soft_cap:
            gradient *= 1.0 - (logits / self.soft_cap).square()


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """What a run over all tiles yields.

    Attributes:
        statistics: [6, N] in the order of `opd.maths.rows.Row`.
        d_hidden: [N, H] gradient of the weighted sum of the divergences, accumulator dtype; empty when not wanted.
        d_head: [V, H] likewise.
        d_bias: [V] likewise.
        figures: [7, N] in the order of `opd.maths.diagnostics.TOPK_FIGURES`, [0, N] when not wanted.
    """

    statistics: Float[Tensor, "6 N"]
    d_hidden: Tensor
    d_head: Tensor
    d_bias: Tensor
    figures: Float[Tensor, "F N"]


def run_tiles(
    student: Side,
    teacher: Side,
    spec: Spec,
    temperature: float,
    token_weights: Float[Tensor, " N"],
    *,
    reference: Side | None = None,
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
    statistics = torch.empty(len(Row), len(student.hidden), dtype=student.dtype, device=student.hidden.device)
    figures = statistics.new_empty(len(TOPK_FIGURES) if topk else 0, len(student.hidden))
    gradients = LogitGradients(student, wanted)
    for tile, (ours, theirs, *spare) in tiles_of(student, 2 if reference is None else 3, scratch_bytes):
        project(student, tile, ours)
        project(teacher, tile, theirs)
        if reference is not None:
            project(reference, tile, spare[0])
            theirs.mul_(teacher_power).add_(spare[0], alpha=1.0 - teacher_power)
        for block in row_blocks(ours) if topk else ():
            at = slice(tile.start + block.start, tile.start + block.stop)
            figures[:, at] = topk_rows(ours[block], theirs[block], topk, temperature)
        factor = token_weights[tile] * (spec.scale * student.scale / temperature) if any(wanted) else None
        statistics[:, tile] = fold_(ours, theirs, spec, temperature, soft_cap=student.soft_cap, factor=factor)
        if any(wanted):
            gradients.add(tile, ours)
    return Tiles(statistics, *gradients.tensors(), figures)


def tiles_of(side: Side, buffers: int, scratch_bytes: int | None) -> Iterator[tuple[slice, list[Float[Tensor, "n V"]]]]:
    """Tiles of tokens with their logit buffers, which are reused from tile to tile and fit `scratch_bytes` together.

    Args:
        side: gives tokens, vocabulary, dtype and device.
        buffers: how many [n, V] buffers a tile needs.
        scratch_bytes: bound on all of them; None for the device's default. At least one token per tile.
    """
    tokens, vocabulary, device = len(side.hidden), len(side.head), side.hidden.device
    if scratch_bytes is None:
        scratch_bytes = GPU_SCRATCH if device.type == "cuda" else CPU_SCRATCH
    most = max(1, scratch_bytes // (side.dtype.itemsize * buffers * vocabulary))
    rows = max(1, -(-tokens // -(-tokens // most))) if tokens else 1  # tiles of even size
    held = [torch.empty(rows, vocabulary, dtype=side.dtype, device=device) for _ in range(buffers)]
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        yield slice(start, stop), [buffer[: stop - start] for buffer in held]


def project(side: Side, tile: slice, out: Float[Tensor, "n V"]) -> None:
    """Writes a tile's logits, float32 accumulation also for half-precision inputs."""
    hidden, transposed = side.hidden[tile], side.head.t()
    if hidden.dtype == out.dtype:
        torch.mm(hidden, transposed, out=out)
    elif out.is_cuda:
        torch.mm(hidden, transposed, out_dtype=out.dtype, out=out)
    else:
        wide = hidden.to(out.dtype)
        for step in _vocabulary_steps(out.shape[-1]):
            out[:, step] = wide @ transposed[:, step].to(out.dtype)
    if side.bias is not None:
        out += side.bias
    if side.scale != 1.0:
        out *= side.scale
    if side.soft_cap:
        out.div_(side.soft_cap).tanh_().mul_(side.soft_cap)


class LogitGradients:
    """Accumulates the gradients of hidden states, head and bias from the gradients of logit tiles.

    Args:
        student: whose.
        wanted: whether gradients of hidden states, head and bias are wanted.
    """

    def __init__(self, student: Side, wanted: tuple[bool, bool, bool]) -> None:
        def zeros(tensor: Tensor | None, want: bool) -> Tensor | None:
            if tensor is None or not want:
                return None
            return torch.zeros(tensor.shape, dtype=student.dtype, device=tensor.device)

        self.student = student
        self.d_hidden = zeros(student.hidden, wanted[0])
        self.d_head = zeros(student.head, wanted[1])
        self.d_bias = zeros(student.bias, wanted[2])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, empty tensors where not wanted."""

        def found(tensor: Tensor | None) -> Tensor:
            return self.student.hidden.new_empty(0, dtype=self.student.dtype) if tensor is None else tensor

        return found(self.d_hidden), found(self.d_head), found(self.d_bias)

    def add(self, tile: slice, d_logits: Float[Tensor, "n V"]) -> None:
        """Adds a tile's share; `d_logits` is the gradient on scale * (projection + bias), times the scale."""
        hidden, head = self.student.hidden[tile], self.student.head
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0)
        if head.dtype == d_logits.dtype:
            if self.d_hidden is not None:
                torch.mm(d_logits, head, out=self.d_hidden[tile])
            if self.d_head is not None:
                self.d_head.addmm_(d_logits.t(), hidden)
            return
        for step in _vocabulary_steps(len(head)):
            part = d_logits[:, step].to(head.dtype) if d_logits.is_cuda else d_logits[:, step]
            if self.d_hidden is not None:
                _accumulate(self.d_hidden[tile], part, head[step])
            if self.d_head is not None:
                _accumulate(self.d_head[step], part.t(), hidden)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Total += left @ right, in the dtype of `total`, for half-precision `right`."""
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left, right.to(total.dtype))


def _kernel(backend: str) -> Callable[..., Tensor]:
    """`opd.maths.rows.fold_rows_` for a whole tile, by the backend."""
    if backend == "triton":
        from opd.maths import linear_triton

        return linear_triton.fold_
    return fold_tile_


def fold_tile_(
    student: Float[Tensor, "n V"],
    teacher: Float[Tensor, "n V"],
    spec: Spec,
    temperature: float,
    *,
    soft_cap: float = 0.0,
    factor: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "6 n"]:
    """`fold_rows_` over the blocks of a tile."""
    statistics = torch.empty(len(Row), len(student), dtype=student.dtype, device=student.device)
    for block in row_blocks(student):
        part = None if factor is None else factor[block]
        found = fold_rows_(student[block], teacher[block], spec, temperature, soft_cap=soft_cap, factor=part)
        statistics[:, block] = found
    return statistics


def _vocabulary_steps(vocabulary: int) -> Iterator[slice]:
    for start in range(0, vocabulary, _VOCABULARY_STEP):
        yield slice(start, min(start + _VOCABULARY_STEP, vocabulary))
