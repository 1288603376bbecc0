"""The student's token scores and top k from hidden states and head, without logits [N, V].

    ids = linear_topk(hidden, head, 64)
    scores = linear_token_scores(hidden, head, candidate_ids=ids, sampled_ids=y)
    loss = head_tail_reverse_kl(scores, y, ids, teacher_log_probs, teacher_sampled, teacher_log_tail).mean

For the payloads sampled, topk and gather this is what `linear_divergence` is for hidden. The backward pass projects the
tiles again, because the gradients of the scores are not known in the forward pass.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.heads import OutputHead
from opd.maths.blocks import row_blocks
from opd.maths.checks import (
    check_ids,
    check_integer,
    check_last_axis,
    check_mask,
    check_projection,
    check_shape,
    check_temperature,
    should_check_values,
)
from opd.maths.linear.divergence import prepared
from opd.maths.linear.gradients import gradients_within
from opd.maths.linear.inputs import check_hidden_and_head, check_scratch
from opd.maths.linear.project import Projection, scratch_of, tiles_of
from opd.maths.rows import log_probs
from opd.maths.scores import ScoreStatistic, TokenScores, arriving_gradients, score_rows, score_rows_gradient


def linear_token_scores(
    hidden: Float[Tensor, "N H"],
    head: OutputHead | Float[Tensor, "V H"],
    *,
    candidate_ids: Int[Tensor, "N K"] | None = None,
    sampled_ids: Int[Tensor, " N"] | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask: Bool[Tensor, " N"] | None = None,
    scratch_bytes: int | None = None,
    check_values: bool | None = None,
) -> TokenScores:
    """`score_tokens` of the logits that `head` makes of `hidden`, which are never held as a whole.

    Args:
        hidden: [N, H] after the final norm, carries the gradient.
        head: the head, or its weight [V, H] alone. Weight and bias carry gradients. The weight may be tied to the
            embedding, or a DTensor, which is gathered once.
        candidate_ids: [N, K] distinct within a position, or None.
        sampled_ids: [N], or None.
        temperature: divides the logits, above 0.
        vocab_size: number of ids that count; rows of the head beyond it are padding. None for all rows.
        mask: [N] bool, True where a position counts; masked rows give zeros and get a zero gradient. They are projected
            all the same: pass only the rows that count to save the work.
        scratch_bytes: bound on the logit tile; None for 1 GiB on a GPU and 128 MiB on CPU.
        check_values: whether to refuse invalid ids and rows that are not finite; by default on CPU only.

    Raises:
        ValueError: if a shape, a dtype, an id or a setting is not valid.
    """
    head = OutputHead.of(head)
    check_temperature(temperature)
    limit = check_hidden_and_head(hidden, head, vocab_size)
    check_scratch(scratch_bytes)
    tokens = len(hidden)
    check_mask("mask", mask, (tokens,), "hidden")
    ids = torch.empty(tokens, 0, dtype=torch.int64, device=hidden.device) if candidate_ids is None else candidate_ids
    check_last_axis("candidate_ids", ids, (tokens,), "hidden")
    if mask is not None:
        # Masked rows are zeroed, not dropped: their number would decide shapes, for which an accelerator has to be
        # waited for.
        hidden = torch.where(mask.unsqueeze(-1), hidden, torch.zeros_like(hidden))
        # Masked candidates may be padding that repeats; 0 to K - 1 are distinct, and their scores are zeroed below.
        ids = torch.where(mask.unsqueeze(-1), ids, torch.arange(ids.shape[-1], device=ids.device))
    check_ids("candidate_ids", ids, limit, distinct=True, check_values=check_values)
    if sampled_ids is not None:
        check_shape("sampled_ids", sampled_ids, (tokens,), "hidden")
        sampled_ids = sampled_ids if mask is None else torch.where(mask, sampled_ids, torch.zeros_like(sampled_ids))
        check_ids("sampled_ids", sampled_ids, limit, check_values=check_values)
        sampled_ids = sampled_ids.long().unsqueeze(-1)
    hidden, weight, bias = prepared(hidden, head, limit, detach=False)
    picked, rows = linear_scores_op(
        hidden, weight, bias, ids.long(), sampled_ids, head.scale, head.soft_cap, temperature, scratch_bytes or 0
    )
    if should_check_values(hidden, check_values):
        check_projection("hidden", hidden, rows[ScoreStatistic.LOG_Z].detach(), None)
    if mask is not None:
        rows = torch.where(mask, rows, torch.zeros_like(rows))
        picked = torch.where(mask.unsqueeze(-1), picked, torch.zeros_like(picked))
    return TokenScores(
        picked,
        rows[ScoreStatistic.SAMPLED],
        rows[ScoreStatistic.LOG_TAIL],
        rows[ScoreStatistic.LOG_Z],
        rows[ScoreStatistic.ENTROPY].detach(),
        rows[ScoreStatistic.MEAN],
    )


@torch.no_grad()
def linear_topk(
    hidden: Float[Tensor, "N H"],
    head: OutputHead | Float[Tensor, "V H"],
    k: int,
    *,
    vocab_size: int | None = None,
    scratch_bytes: int | None = None,
    check_values: bool | None = None,
) -> Int[Tensor, "N K"]:
    """The k most likely ids of each position, most likely first, without logits [N, V]; no gradient.

    Args:
        hidden: [N, H] after the final norm.
        head: the head, or its weight [V, H] alone.
        k: 1 to the size of the vocabulary.
        vocab_size: number of ids that count; rows of the head beyond it are padding. None for all rows.
        scratch_bytes: as for `linear_token_scores`.
        check_values: whether to refuse NaN and +inf; by default on CPU only.

    Raises:
        ValueError: if a shape, a dtype, a setting or k is not valid.
    """
    head = OutputHead.of(head)
    limit = check_hidden_and_head(hidden, head, vocab_size)
    check_scratch(scratch_bytes)
    check_integer("k", k, 1, limit, "the vocabulary")
    check = should_check_values(hidden, check_values)
    hidden, weight, bias = prepared(hidden, head, limit, detach=True)
    model = Projection(hidden, OutputHead(weight, bias, head.scale, head.soft_cap))
    found = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(model, 1, scratch_of(model, scratch_bytes)):
            model.write(tile, logits)
            values, found[tile] = logits.topk(k)
            if check:  # topk puts NaN first, so the first value tells
                check_projection("hidden", hidden, values[:, 0], torch.arange(tile.start, tile.stop))
    return found


@torch.library.custom_op("opd::linear_scores", mutates_args=())
def linear_scores_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    sampled_ids: Tensor | None,
    scale: float,
    soft_cap: float,
    temperature: float,
    scratch_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs at the ids [N, K], and the statistics [5, N] in the order of `ScoreStatistic`."""
    model = Projection(hidden, OutputHead(weight, bias, scale, soft_cap))
    picked = torch.empty(ids.shape, dtype=model.dtype, device=hidden.device)
    rows = torch.empty(len(ScoreStatistic), len(hidden), dtype=model.dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(model, 1, scratch_of(model, scratch_bytes)):
            model.write(tile, logits)
            for block in row_blocks(logits):
                at = slice(tile.start + block.start, tile.start + block.stop)
                y = None if sampled_ids is None else sampled_ids[at]
                picked[at], rows[:, at] = score_rows(logits[block], ids[at], y, temperature, model.dtype)
    return picked, rows


@torch.library.custom_op("opd::linear_scores_backward", mutates_args=())
def linear_scores_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    sampled_ids: Tensor | None,
    rows: Tensor,
    d_picked: Tensor,
    d_rows: Tensor,
    scale: float,
    soft_cap: float,
    temperature: float,
    scratch_bytes: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden states, head and bias; empty where not wanted."""
    model = Projection(hidden, OutputHead(weight, bias, scale, soft_cap))
    log_z, log_tail = rows[ScoreStatistic.LOG_Z], rows[ScoreStatistic.LOG_TAIL]
    # The entropy is detached, so no gradient arrives at its row.
    trained = (ScoreStatistic.SAMPLED, ScoreStatistic.LOG_TAIL, ScoreStatistic.LOG_Z, ScoreStatistic.MEAN)
    arriving = arriving_gradients(ids.shape[1], log_z, log_tail, d_picked, *(d_rows[row] for row in trained))
    gradients, scratch = gradients_within(model, (wanted[0], wanted[1], wanted[2]), scratch_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(model, 1, scratch):
            model.write(tile, logits)
            for block in row_blocks(logits):
                at = slice(tile.start + block.start, tile.start + block.stop)
                log_p = log_probs(logits[block], log_z[at], temperature)
                y = None if sampled_ids is None else sampled_ids[at]
                gradient = score_rows_gradient(log_p, ids[at], y, log_tail[at], *(g[at] for g in arriving))
                model.head.through_cap_(gradient, logits[block])
                # Into the logits, which this block no longer needs: the tile becomes its own gradient.
                torch.mul(gradient, scale / temperature, out=logits[block])
            gradients.add(tile, logits)
    return gradients.tensors()


@linear_scores_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty(ids.shape, dtype=dtype), hidden.new_empty(len(ScoreStatistic), len(hidden), dtype=dtype)


@linear_scores_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, wanted = others
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    shapes, dtypes = (hidden.shape, weight.shape, weight.shape[:1]), (hidden.dtype, dtype, dtype)
    return tuple(
        hidden.new_empty(shape if want else (0,), dtype=dtype)
        for shape, want, dtype in zip(shapes, wanted, dtypes, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, ids, sampled_ids, *ctx.settings = inputs
    _, rows = output
    ctx.save_for_backward(hidden, weight, bias, ids, sampled_ids, rows)


def _backward(ctx: Any, d_picked: Tensor, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    wanted = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = linear_scores_backward_op(*ctx.saved_tensors, d_picked, d_rows, *ctx.settings, wanted)
    gradients = [
        gradient.to(tensor.dtype) if want else None
        for gradient, tensor, want in zip(found, ctx.saved_tensors, wanted, strict=False)
    ]
    return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


linear_scores_op.register_autograd(_backward, setup_context=_setup_context)
