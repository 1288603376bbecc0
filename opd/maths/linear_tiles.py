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
from opd.maths.pointwise import Spec
from opd.maths.rows import Row, row_gradient, row_statistics

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


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """What a run over all tiles yields.

    Attributes:
        statistics: [6, N] in the order of `opd.maths.rows.Row`.
        d_hidden: [N, H] gradient of the weighted sum of the divergences, accumulator dtype; None when not wanted.
        d_head: [V, H] likewise.
        d_bias: [V] likewise.
    """

    statistics: Float[Tensor, "6 N"]
    d_hidden: Float[Tensor, "N H"] | None
    d_head: Float[Tensor, "V H"] | None
    d_bias: Float[Tensor, " V"] | None


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
    """
    tokens, vocabulary = len(student.hidden), len(student.head)
    dtype = torch.float64 if student.hidden.dtype == torch.float64 else torch.float32
    device = student.hidden.device
    kernels = _kernels(backend)
    count = 2 if reference is None else 3
    rows = _tile_rows(tokens, vocabulary, count, dtype, scratch_bytes, device)
    buffers = [torch.empty(rows, vocabulary, dtype=dtype, device=device) for _ in range(count)]
    statistics = torch.empty(len(Row), tokens, dtype=dtype, device=device)
    gradients = _Gradients(student, dtype, wanted)
    for tile in _tiles(tokens, rows):
        ours, theirs, *spare = (buffer[: tile.stop - tile.start] for buffer in buffers)
        project(student, tile, ours)
        project(teacher, tile, theirs)
        if reference is not None:
            project(reference, tile, spare[0])
            theirs.mul_(teacher_power).add_(spare[0], alpha=1.0 - teacher_power)
        kernels.statistics(ours, theirs, spec, temperature, statistics[:, tile])
        if any(wanted):
            factor = token_weights[tile] * (spec.scale / temperature)
            kernels.gradient_(
                ours, theirs, statistics[:, tile], factor, spec, temperature, student.scale, student.soft_cap
            )
            gradients.add(tile, ours)
    return Tiles(statistics, gradients.d_hidden, gradients.d_head, gradients.d_bias)


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


class _Gradients:
    """Accumulates the gradients of hidden states, head and bias from the gradients of logit tiles."""

    def __init__(self, student: Side, dtype: torch.dtype, wanted: tuple[bool, bool, bool]) -> None:
        def zeros(tensor: Tensor, want: bool) -> Tensor | None:
            return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if want else None

        self.student = student
        self.d_hidden = zeros(student.hidden, wanted[0])
        self.d_head = zeros(student.head, wanted[1])
        self.d_bias = None if student.bias is None else zeros(student.bias, wanted[2])

    def add(self, tile: slice, d_logits: Float[Tensor, "n V"]) -> None:
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


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The two steps that a backend provides.

    Attributes:
        statistics: (student, teacher, spec, temperature, out [6, n]).
        gradient_: (student, teacher, statistics, factor [n], spec, temperature, scale, soft_cap): replaces the
            student's logits by factor * the gradient on the projection.
    """

    statistics: Callable[..., None]
    gradient_: Callable[..., None]


def _kernels(backend: str) -> _Kernels:
    if backend == "triton":
        from opd.maths import linear_triton

        return _Kernels(linear_triton.statistics, linear_triton.gradient_)
    return _Kernels(_statistics, _gradient_)


def _statistics(student: Tensor, teacher: Tensor, spec: Spec, temperature: float, out: Tensor) -> None:
    for block in row_blocks(student):
        out[:, block] = row_statistics(student[block], teacher[block], spec, temperature, student.dtype)


def _gradient_(
    student: Tensor,
    teacher: Tensor,
    statistics: Tensor,
    factor: Tensor,
    spec: Spec,
    temperature: float,
    scale: float,
    soft_cap: float,
) -> None:
    for block in row_blocks(student):
        gradient = row_gradient(student[block], teacher[block], statistics[:, block], spec, temperature)
        if soft_cap:  # d tanh: the buffer holds the capped logits
            gradient *= 1.0 - (student[block] / soft_cap).square()
        torch.mul(gradient, (factor[block] * scale).unsqueeze(-1), out=student[block])


def _tile_rows(
    tokens: int, vocabulary: int, buffers: int, dtype: torch.dtype, scratch_bytes: int | None, device: torch.device
) -> int:
    """Tokens per tile so that its logit buffers fit `scratch_bytes`; at least one, evenly shared out."""
    if scratch_bytes is None:
        scratch_bytes = GPU_SCRATCH if device.type == "cuda" else CPU_SCRATCH
    most = max(1, scratch_bytes // (dtype.itemsize * buffers * vocabulary))
    tiles = -(-tokens // most) if tokens else 1
    return max(1, -(-tokens // tiles))


def _tiles(tokens: int, rows: int) -> Iterator[slice]:
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def _vocabulary_steps(vocabulary: int) -> Iterator[slice]:
    for start in range(0, vocabulary, _VOCABULARY_STEP):
        yield slice(start, min(start + _VOCABULARY_STEP, vocabulary))
