"""The student's log-probs at a few ids per position, without a log-softmax over the vocabulary.

    scores = score_tokens(student_logits, candidate_ids=ids, sampled_ids=y)

One pass over the logits yields the logsumexp, the gathered log-probs, the tail (a logsumexp over the complement of the
candidates, exact also when it holds 1e-12 of the mass) and the entropy; one pass yields the gradient of all of them.
Every partial-support estimator takes either the logits or a ready `TokenScores`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.blocks import accumulator_dtype, flat_rows, row_blocks, select_rows
from opd.maths.checks import (
    check_ids,
    check_logits,
    check_mask,
    check_rows_finite,
    check_shape,
    check_temperature,
    should_check_values,
)
from opd.maths.rows import entropy, log_probs


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probs of one model at chosen ids, in nats, normalised over its full vocabulary.

    Attributes:
        candidates: [..., K] at the candidate ids, with gradient.
        sampled: [...] at the sampled id, with gradient; zeros when none was asked for.
        log_tail: [...] log mass outside the candidates, with gradient; -inf when they cover the vocabulary.
        log_z: [...] logsumexp of the tempered logits, with gradient.
        entropy: [...] over the full vocabulary, detached.
    """

    candidates: Float[Tensor, "*N K"]
    sampled: Float[Tensor, "*N"]
    log_tail: Float[Tensor, "*N"]
    log_z: Float[Tensor, "*N"]
    entropy: Float[Tensor, "*N"]


def score_tokens(
    logits: Float[Tensor, "*N V"],
    *,
    candidate_ids: Int[Tensor, "*N K"] | None = None,
    sampled_ids: Int[Tensor, "*N"] | None = None,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> TokenScores:
    """Log-probs at chosen ids with log-normaliser, tail and entropy, all from one pass.

    Args:
        logits: [..., V], any float dtype; accumulation in float32 (float64 for float64).
        candidate_ids: [..., K] distinct within a position, or None for none.
        sampled_ids: [...], or None.
        temperature: divides the logits, above 0.
        mask: [...] bool; masked rows give zeros and get a zero gradient, whatever they hold.
        check_values: whether to refuse bad ids and non-finite rows; by default on CPU only.

    Raises:
        ValueError: for shapes, dtypes, ids, temperature or logits that cannot work.
    """
    check_logits("logits", logits)
    check_temperature(temperature)
    leading, vocabulary = tuple(logits.shape[:-1]), logits.shape[-1]
    check_mask("mask", mask, leading, "the leading axes of logits")
    if candidate_ids is None:
        candidate_ids = torch.empty(*leading, 0, dtype=torch.int64, device=logits.device)
    if sampled_ids is not None:
        check_shape("sampled_ids", sampled_ids, leading, "the leading axes of logits")
        check_ids("sampled_ids", _counted(sampled_ids, mask), vocabulary, check_values=check_values)
    check_shape("candidate_ids", candidate_ids, (*leading, candidate_ids.shape[-1]), "the leading axes of logits")
    check_ids("candidate_ids", _counted(candidate_ids, mask), vocabulary, distinct=True, check_values=check_values)
    outputs = _TokenScores.apply(
        flat_rows(logits),
        _flat_ids(candidate_ids, mask, leading),
        None if sampled_ids is None else _flat_ids(sampled_ids, mask, leading).unsqueeze(-1),
        None if mask is None else mask.reshape(-1),
        temperature,
        should_check_values(logits, check_values),
    )
    return TokenScores(*(out.reshape(*leading, *out.shape[1:]) for out in outputs))


def _counted(ids: Tensor, mask: Tensor | None) -> Tensor:
    """The ids that count, for checks on the host only: selecting by mask would make an accelerator wait."""
    return ids[mask] if mask is not None and ids.device.type == "cpu" else ids


def _flat_ids(ids: Tensor, mask: Tensor | None, leading: tuple[int, ...]) -> Tensor:
    """[N, ...] int64 ids with padding replaced by 0, which is always inside the vocabulary."""
    if mask is not None:
        shaped = mask.reshape(*leading, *(1 for _ in ids.shape[len(leading) :]))
        ids = torch.where(shaped, ids, torch.zeros_like(ids))
    return ids.reshape(math.prod(leading), *ids.shape[len(leading) :]).long()


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        sampled_ids: Tensor | None,
        mask: Tensor | None,
        temperature: float,
        check: bool,
    ) -> tuple[Tensor, ...]:
        dtype = accumulator_dtype(logits)
        picked = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        # Rows: log-prob of the sampled id, log tail, log_z, entropy.
        rows = torch.zeros(4, len(logits), dtype=dtype, device=logits.device)
        for block in row_blocks(logits):
            log_z = torch.logsumexp(logits[block].to(dtype) / temperature, dim=-1)
            log_p = log_probs(logits[block], log_z, temperature)
            picked[block] = log_p.gather(1, ids[block])
            if sampled_ids is not None:
                rows[0, block] = log_p.gather(1, sampled_ids[block]).squeeze(1)
            rows[2, block], rows[3, block] = log_z, entropy(log_p)
            rows[1, block] = log_p.scatter_(1, ids[block], -torch.inf).logsumexp(-1)
        if check:
            check_rows_finite("logits", logits, rows[2], mask)
        if mask is not None:
            rows = torch.where(mask, rows, torch.zeros_like(rows))
            picked = torch.where(mask.unsqueeze(-1), picked, torch.zeros_like(picked))
        sampled, log_tail, log_z, entropies = rows.unbind(0)
        ctx.save_for_backward(logits, ids, sampled_ids, mask, log_z, log_tail)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropies)
        return picked, sampled, log_tail, log_z, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, d_picked: Tensor | None, d_sampled: Tensor | None, d_tail: Tensor | None, d_z: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        logits, ids, sampled_ids, mask, log_z, log_tail = ctx.saved_tensors
        if d_tail is not None:  # an empty tail is the constant -inf
            d_tail = torch.where(log_tail.isneginf(), torch.zeros_like(d_tail), d_tail)
        # Each log-prob gives one-hot minus p, so p is multiplied by minus the sum of all that arrives.
        arriving = [None if d_picked is None else -d_picked.sum(-1), d_z]
        arriving += [None if grad is None else -grad for grad in (d_sampled, d_tail)]
        p_factor = sum((grad for grad in arriving if grad is not None), torch.zeros_like(log_z))
        out = torch.empty_like(logits)
        for block in row_blocks(logits):
            log_p = log_probs(logits[block], log_z[block], ctx.temperature)
            gradient = log_p.exp() * p_factor[block].unsqueeze(-1)
            if d_tail is not None:
                outside = log_p.scatter_(1, ids[block], -torch.inf).sub_(log_tail[block].unsqueeze(-1))
                conditional = torch.where(log_tail[block].isneginf().unsqueeze(-1), 0.0, outside.exp())
                gradient.addcmul_(conditional, d_tail[block].unsqueeze(-1))
            if d_picked is not None:
                gradient.scatter_add_(1, ids[block], d_picked[block])
            if d_sampled is not None and sampled_ids is not None:
                gradient.scatter_add_(1, sampled_ids[block], d_sampled[block].unsqueeze(-1))
            chosen = select_rows(mask, block)
            gradient = gradient if chosen is None else torch.where(chosen, gradient, torch.zeros_like(gradient))
            out[block] = gradient.div_(ctx.temperature)
        return out, None, None, None, None, None
