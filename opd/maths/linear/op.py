"""The tiled divergence as one torch operator with autograd, opaque to `torch.compile`.

The operator returns the weighted sum, the statistics and the finished gradients of that sum, so the backward pass only
multiplies them by the incoming scalar. With `recompute` no gradients are kept, and the backward pass runs the tiles
again with the weights that arrive at the individual tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.heads import OutputHead
from opd.maths.diagnostics import TOPK_FIGURES
from opd.maths.linear.project import Projection
from opd.maths.linear.tiles import run_tiles
from opd.maths.pointwise import Kind, Spec
from opd.maths.rows import Statistic


class _Tensors(NamedTuple):
    """The operator's tensor arguments, which come first, in its order."""

    student_hidden: Tensor
    student_head: Tensor
    student_bias: Tensor | None
    teacher_hidden: Tensor
    teacher_head: Tensor
    teacher_bias: Tensor | None
    reference_hidden: Tensor | None
    reference_head: Tensor | None
    reference_bias: Tensor | None
    token_weights: Tensor


class _Settings(NamedTuple):
    """The operator's other arguments, in its order."""

    kind: str
    weight: float
    spec_scale: float
    temperature: float
    teacher_power: float
    scales: list[float]
    soft_caps: list[float]
    wanted: list[bool]
    recompute: bool
    scratch_bytes: int
    backend: str
    topk: int


def _named(arguments: tuple[Any, ...]) -> tuple[_Tensors, _Settings]:
    count = len(_Tensors._fields)
    return _Tensors(*arguments[:count]), _Settings(*arguments[count:])


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
    """Weighted sum [], statistics [5, N] with the value scaled, the sum's gradients, and top-k figures [7, N].

    Gradients that are not wanted are empty; the figures are [0, N] if `topk` is 0.
    """
    reference = None
    if reference_hidden is not None and reference_head is not None:
        head = OutputHead(reference_head, reference_bias, scales[2], soft_caps[2])
        reference = Projection(reference_hidden, head)
    # The tiles choose the precision of each product; autocast would override it.
    with torch.autocast(student_hidden.device.type, enabled=False):
        tiles = run_tiles(
            Projection(student_hidden, OutputHead(student_head, student_bias, scales[0], soft_caps[0])),
            Projection(teacher_hidden, OutputHead(teacher_head, teacher_bias, scales[1], soft_caps[1])),
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
    # The gradients already contain the scale of the divergence, in their factor; the values get it here.
    statistics = tiles.statistics
    statistics[Statistic.VALUE] *= spec_scale
    total = (statistics[Statistic.VALUE] * token_weights).sum()
    return total, statistics, tiles.d_hidden, tiles.d_head, tiles.d_bias, tiles.figures


@linear_divergence_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings = _named(arguments)
    hidden, head, weights = tensors.student_hidden, tensors.student_head, tensors.token_weights
    shapes, dtypes = (hidden.shape, head.shape, head.shape[:1]), (hidden.dtype, weights.dtype, weights.dtype)
    gradients = (
        weights.new_empty(shape if want and not settings.recompute else (0,), dtype=dtype)
        for shape, want, dtype in zip(shapes, settings.wanted, dtypes, strict=True)
    )
    figures = weights.new_empty(len(TOPK_FIGURES) if settings.topk else 0, len(hidden))
    return weights.new_empty(()), weights.new_empty(len(Statistic), len(hidden)), *gradients, figures


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.settings = _named(inputs)
    trained = tensors.student_hidden, tensors.student_head, tensors.student_bias
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in trained]
    _, _, *gradients, _ = output
    # Either the inputs, to run the tiles again, or the finished gradients; never both.
    ctx.save_for_backward(*(tensors if ctx.settings.recompute else gradients))
    # The statistics stay differentiable: with `recompute`, a loss may weight individual tokens in the row VALUE.
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, d_total: Tensor, d_statistics: Tensor, *_: Tensor) -> tuple[Any, ...]:
    settings: _Settings = ctx.settings
    if settings.recompute:
        tensors = _Tensors(*ctx.saved_tensors)
        arriving = d_total * tensors.token_weights + d_statistics[Statistic.VALUE]
        # The gradient of the sum with these weights is the one asked for. Figures have no gradient.
        again = tensors._replace(token_weights=arriving), settings._replace(recompute=False, topk=0)
        _, _, *gradients, _ = linear_divergence_op(*again[0], *again[1])
    else:
        # In place, because a second copy of the head's gradient would be the largest tensor of the step. Autograd's
        # version check refuses a second backward pass; recompute=True allows it.
        gradients = [saved.mul_(d_total) for saved in ctx.saved_tensors]
    found = [
        gradient.to(dtype) if want and dtype is not None else None
        for gradient, want, dtype in zip(gradients, settings.wanted, ctx.dtypes, strict=True)
    ]
    return (*found, *(None,) * (len(_Tensors._fields) + len(_Settings._fields) - len(found)))


linear_divergence_op.register_autograd(_backward, setup_context=_setup_context)
