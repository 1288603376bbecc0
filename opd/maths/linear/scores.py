"""The student's scores and top-k straight from hidden states and head, without [N, V].

    ids = linear_topk(hidden, head, 64)
    scores = linear_token_scores(hidden, head, candidate_ids=ids, sampled_ids=y)
    loss = head_tail_reverse_kl(scores, y, ids, teacher_log_probs, teacher_sampled, teacher_log_tail).mean

For the payloads sampled, topk and gather, what `linear_divergence` is for hidden. The backward pass projects the tiles
once more, because the gradients of the scores are not known in the forward pass.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
from opd.maths.linear.inputs import HeadSettings, check_hidden_and_head, check_scratch
from opd.maths.linear.project import Side, project, scratch_of, tiles_of
from opd.maths.rows import log_probs
from opd.maths.scores import TokenScores, arriving_gradients, score_rows, score_rows_gradient


def linear_token_scores(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    *,
    candidate_ids: Int[Tensor, "N K"] | None = None,
    sampled_ids: Int[Tensor, " N"] | None = None,
    settings: HeadSettings | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask: Bool[Tensor, " N"] | None = None,
    scratch_bytes: int | None = None,
    check_values: bool | None = None,
) -> TokenScores:
    """`score_tokens` of the logits head @ hidden, which are never held whole.

    Args:
        hidden: [N, H] after the final norm, carries gradient.
        head: [V, H], carries gradient; may be tied or a DTensor, which is gathered once.
        candidate_ids: [N, K] distinct within a position, or None.
        sampled_ids: [N], or None.
        settings: bias, scale and soft-cap of the head.
        temperature: divides the logits, above 0.
        vocab_size: rows of the head beyond it are padding; None for all rows.
        mask: [N] bool; masked rows give zeros and get a zero gradient. Pass only rows that count to save work.
        scratch_bytes: bound on the logit tile; 1 GiB on a GPU and 128 MiB on CPU if None.
        check_values: whether to refuse bad ids and non-finite rows; by default on CPU only.

    Raises:
        ValueError: for shapes, dtypes, ids or settings that cannot work.
    """
    settings = settings or HeadSettings()
    check_temperature(temperature)
    limit = check_hidden_and_head(hidden, head, settings, vocab_size)
    check_scratch(scratch_bytes)
    tokens = len(hidden)
    check_mask("mask", mask, (tokens,), "hidden")
    ids = torch.empty(tokens, 0, dtype=torch.int64, device=hidden.device) if candidate_ids is None else candidate_ids
    check_last_axis("candidate_ids", ids, (tokens,), "hidden")
    if mask is not None:
        hidden = torch.where(mask.unsqueeze(-1), hidden, torch.zeros_like(hidden))
        ids = torch.where(mask.unsqueeze(-1), ids, torch.arange(ids.shape[-1], device=ids.device))
    check_ids("candidate_ids", ids, limit, distinct=True, check_values=check_values)
    if sampled_ids is not None:
        check_shape("sampled_ids", sampled_ids, (tokens,), "hidden")
        sampled_ids = sampled_ids if mask is None else torch.where(mask, sampled_ids, torch.zeros_like(sampled_ids))
        check_ids("sampled_ids", sampled_ids, limit, check_values=check_values)
        sampled_ids = sampled_ids.long().unsqueeze(-1)
    hidden, head, bias = prepared(hidden, head, settings.bias, limit, None, detach=False)
    picked, rows = linear_scores_op(
        hidden, head, bias, ids.long(), sampled_ids, settings.scale, settings.soft_cap, temperature, scratch_bytes or 0
    )
    if should_check_values(hidden, check_values):
        check_projection("hidden", hidden, rows[2].detach(), None)
    if mask is not None:
        rows = torch.where(mask, rows, torch.zeros_like(rows))
        picked = torch.where(mask.unsqueeze(-1), picked, torch.zeros_like(picked))
    return TokenScores(picked, rows[0], rows[1], rows[2], rows[3].detach(), rows[4])


@torch.no_grad()
def linear_topk(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    k: int,
    *,
    settings: HeadSettings | None = None,
    vocab_size: int | None = None,
    scratch_bytes: int | None = None,
    check_values: bool | None = None,
) -> Int[Tensor, "N K"]:
    """The k most likely ids of each position, descending, without [N, V]; no gradient.

    Args:
        hidden: [N, H] after the final norm.
        head: [V, H].
        k: 1 to the vocabulary's size.
        settings: bias, scale and soft-cap of the head.
        vocab_size: rows of the head beyond it are padding; None for all rows.
        scratch_bytes: as in `linear_token_scores`.
        check_values: whether to refuse NaN and +inf; by default on CPU only.

    Raises:
        ValueError: for shapes, dtypes, settings or a k that cannot work.
    """
    settings = settings or HeadSettings()
    limit = check_hidden_and_head(hidden, head, settings, vocab_size)
    check_scratch(scratch_bytes)
    check_integer("k", k, 1, limit, "the vocabulary")
    check = should_check_values(hidden, check_values)
    hidden, head, bias = prepared(hidden, head, settings.bias, limit, None, detach=True)
    side = Side(hidden, head, bias, settings.scale, settings.soft_cap)
    found = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(side, 1, scratch_of(side, scratch_bytes)):
            project(side, tile, logits)
            values, found[tile] = logits.topk(k)
            if check:  # topk puts NaN first
                check_projection("hidden", hidden, values[:, 0], torch.arange(tile.start, tile.stop))
    return found


@torch.library.custom_op("opd::linear_scores", mutates_args=())
def linear_scores_op(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    sampled_ids: Tensor | None,
    scale: float,
    soft_cap: float,
    temperature: float,
    scratch_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs at the ids [N, K], and rows [5, N]: sampled, log tail, log_z, entropy, mean."""
    side = Side(hidden, head, bias, scale, soft_cap)
    picked = torch.empty(ids.shape, dtype=side.dtype, device=hidden.device)
    rows = torch.empty(5, len(hidden), dtype=side.dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(side, 1, scratch_of(side, scratch_bytes)):
            project(side, tile, logits)
            for block in row_blocks(logits):
                at = slice(tile.start + block.start, tile.start + block.stop)
                y = None if sampled_ids is None else sampled_ids[at]
                picked[at], rows[:, at] = score_rows(logits[block], ids[at], y, temperature, side.dtype)
    return picked, rows


@torch.library.custom_op("opd::linear_scores_backward", mutates_args=())
def linear_scores_backward_op(
    hidden: Tensor,
    head: Tensor,
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
    """Gradients of hidden states, head and bias, empty where not wanted."""
    side = Side(hidden, head, bias, scale, soft_cap)
    arriving = arriving_gradients(rows[2], rows[1], d_picked, d_rows[0], d_rows[1], d_rows[2], d_rows[4])
    gradients, scratch = gradients_within(side, (wanted[0], wanted[1], wanted[2]), scratch_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(side, 1, scratch):
            project(side, tile, logits)
            for block in row_blocks(logits):
                at = slice(tile.start + block.start, tile.start + block.stop)
                log_p = log_probs(logits[block], rows[2, at], temperature)
                y = None if sampled_ids is None else sampled_ids[at]
                gradient = score_rows_gradient(log_p, ids[at], y, rows[1, at], *(g[at] for g in arriving))
                side.output_head.through_cap_(gradient, logits[block])
                torch.mul(gradient, scale / temperature, out=logits[block])
            gradients.add(tile, logits)
    return gradients.tensors()


@linear_scores_op.register_fake
def _(hidden: Tensor, head: Tensor, bias: Tensor | None, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty(ids.shape, dtype=dtype), hidden.new_empty(5, len(hidden), dtype=dtype)


@linear_scores_backward_op.register_fake
def _(hidden: Tensor, head: Tensor, *rest: object) -> tuple[Tensor, ...]:
    wanted = rest[-1]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    shapes, dtypes = (hidden.shape, head.shape, head.shape[:1]), (hidden.dtype, dtype, dtype)
    return tuple(
        hidden.new_empty(shape if want else (0,), dtype=dtype)
        for shape, want, dtype in zip(shapes, wanted, dtypes, strict=True)  # type: ignore[call-overload]
    )


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, head, bias, ids, sampled_ids, *ctx.settings = inputs
    ctx.save_for_backward(hidden, head, bias, ids, sampled_ids, output[1])


def _backward(ctx, d_picked, d_rows):  # type: ignore[no-untyped-def]
    wanted = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = linear_scores_backward_op(*ctx.saved_tensors, d_picked, d_rows, *ctx.settings, wanted)
    gradients = (
        gradient.to(tensor.dtype) if want else None
        for gradient, tensor, want in zip(found, ctx.saved_tensors, wanted, strict=False)
    )
    return (*gradients, *(None,) * 6)


linear_scores_op.register_autograd(_backward, setup_context=_setup_context)
