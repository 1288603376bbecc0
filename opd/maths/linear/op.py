"""The tiled divergence as one torch operator, opaque to `torch.compile`, with its autograd.

The operator returns the weighted sum, the statistics and the finished gradients of that sum, so the backward pass is a
multiplication by the incoming scalar. With `recompute` no gradients are kept; the backward pass runs the tiles again
with whatever weights arrive at the single tokens.
"""

from typing import Any

import torch
from torch import Tensor

from opd.maths.diagnostics import TOPK_FIGURES
from opd.maths.linear.project import Side
from opd.maths.linear.tiles import run_tiles
from opd.maths.pointwise import Kind, Spec
from opd.maths.rows import Row


@torch.library.custom_op("opd::linear_divergence", mutates_args=())
def linear_divergence_op(
    student_hidden: Tensor,
    student_head: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    teacher_bias: Tensor | None,
    reference_hidden: Tensor | None,
    reference_head: Tensor | None,
    reference_bias: Tensor | None,
    token_weights: Tensor,
    kind: str,
    weight: float,
    spec_scale: float,
    temperature: float,
    teacher_power: float,
    scales: list[float],
    soft_caps: list[float],
    wanted: list[bool],
    recompute: bool,
    scratch_bytes: int,
    backend: str,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum [], statistics [5, N] with the value scaled, gradients of the sum and top-k figures [7, N].

    Gradients are empty when not wanted, figures [0, N] when `topk` is 0.
    """
    reference = None
    if reference_hidden is not None and reference_head is not None:
        reference = Side(reference_hidden, reference_head, reference_bias, scales[2], soft_caps[2])
    with torch.autocast(student_hidden.device.type, enabled=False):
        tiles = run_tiles(
            Side(student_hidden, student_head, student_bias, scales[0], soft_caps[0]),
            Side(teacher_hidden, teacher_head, teacher_bias, scales[1], soft_caps[1]),
            Spec(Kind(kind), weight, spec_scale),
            temperature,
            token_weights,
            reference=reference,
            teacher_power=teacher_power,
            wanted=(False, False, False) if recompute else (wanted[0], wanted[1], wanted[2]),
            scratch_bytes=scratch_bytes or None,
            backend=backend,
            topk=topk,
        )
    statistics = tiles.statistics
    statistics[Row.VALUE] *= spec_scale
    total = (statistics[Row.VALUE] * token_weights).sum()
    return total, statistics, tiles.d_hidden, tiles.d_head, tiles.d_bias, tiles.figures


@linear_divergence_op.register_fake
def _(student_hidden: Tensor, student_head: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    token_weights, wanted, recompute, topk = rest[7], rest[15], rest[16], rest[19]
    shapes = student_hidden.shape, student_head.shape, student_head.shape[:1]
    dtypes = student_hidden.dtype, token_weights.dtype, token_weights.dtype
    gradients = (
        token_weights.new_empty(shape if want and not recompute else (0,), dtype=dtype)
        for shape, want, dtype in zip(shapes, wanted, dtypes, strict=True)
    )
    tokens = len(student_hidden)
    figures = token_weights.new_empty(len(TOPK_FIGURES) if topk else 0, tokens)
    return token_weights.new_empty(()), token_weights.new_empty(len(Row), tokens), *gradients, figures


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[10:]
    ctx.recompute = inputs[18]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:3]]
    ctx.save_for_backward(*(inputs[:10] if ctx.recompute else output[2:5]))
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, d_total: Tensor, d_statistics: Tensor, *_: Tensor) -> tuple[Any, ...]:
    if ctx.recompute:
        *tensors, token_weights = ctx.saved_tensors
        arriving = d_total * token_weights + d_statistics[Row.VALUE]
        settings = list(ctx.settings)
        settings[8], settings[11] = False, 0  # recompute, topk
        gradients = list(linear_divergence_op(*tensors, arriving, *settings)[2:5])
    else:
        # In place, because a second copy of the head's gradient would be the largest tensor of the step. A second
        # backward pass is refused by autograd's version check; recompute=True allows it.
        gradients = [saved.mul_(d_total) for saved in ctx.saved_tensors]
    wanted = ctx.settings[7]
    found = [
        gradient.to(dtype) if want and dtype is not None else None
        for gradient, want, dtype in zip(gradients, wanted, ctx.dtypes, strict=True)
    ]
    return (*found, *(None,) * 19)


linear_divergence_op.register_autograd(_backward, setup_context=_setup_context)
