"""The student's log-probs at a few ids per position, without a log-softmax over the vocabulary.

    scores = score_tokens(student_logits, candidate_ids=ids, sampled_ids=y)

One pass over the logits yields the logsumexp, the gathered log-probs, the tail (a logsumexp over the complement of the
candidates, accurate even if it holds 1e-12 of the mass) and the entropy; a second pass yields the gradient of all of
them. Every estimator on part of the vocabulary takes either logits or a `TokenScores`.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.blocks import accumulator_dtype, flat_rows, row_blocks, select_rows
from opd.maths.checks import (
    check_ids,
    check_last_axis,
    check_logits,
    check_mask,
    check_rows_finite,
    check_shape,
    check_temperature,
    should_check_values,
)
from opd.maths.rows import entropy, log_probs


class ScoreStatistic(IntEnum):
    """Rows of the statistics [5, n] of a few rows of logits; in nats at the given temperature."""

    SAMPLED = 0
    LOG_TAIL = 1
    LOG_Z = 2
    ENTROPY = 3
    MEAN = 4


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probs of one model at chosen ids, in nats at one temperature, normalised over its full vocabulary.

    Attributes:
        candidates: [..., K] at the candidate ids, with gradient.
        sampled: [...] at the sampled id, with gradient; zeros if none was given.
        log_tail: [...] log mass outside the candidates, with gradient; -inf if they cover the vocabulary.
        log_z: [...] logsumexp of the tempered logits, with gradient.
        entropy: [...] entropy over the full vocabulary, detached.
        mean_log_prob: [...] unweighted mean of the log-probs of all V ids, with gradient; -inf if an id is excluded.
    """

    candidates: Float[Tensor, "*N K"]
    sampled: Float[Tensor, "*N"]
    log_tail: Float[Tensor, "*N"]
    log_z: Float[Tensor, "*N"]
    entropy: Float[Tensor, "*N"]
    mean_log_prob: Float[Tensor, "*N"]


def score_tokens(
    logits: Float[Tensor, "*N V"],
    *,
    candidate_ids: Int[Tensor, "*N K"] | None = None,
    sampled_ids: Int[Tensor, "*N"] | None = None,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
    check_values: bool | None = None,
) -> TokenScores:
    """Log-probs at chosen ids with the log-normaliser, tail and entropy, from one pass over the logits.

    Args:
        logits: [..., V], any float dtype; accumulated in float32 (float64 for float64).
        candidate_ids: [..., K] distinct within a position; None for no candidates.
        sampled_ids: [...] one id per position, or None.
        temperature: divides the logits, above 0.
        mask: [...] bool, True where a position counts; masked rows give zeros and get a zero gradient, whatever they
            hold.
        check_values: whether to refuse invalid ids and rows that are not finite; by default on CPU only.

    Raises:
        ValueError: if a shape, a dtype, an id, the temperature or a row of logits is not valid.
    """
    check_logits("logits", logits)
    check_temperature(temperature)
    leading, vocabulary = tuple(logits.shape[:-1]), logits.shape[-1]
    check_mask("mask", mask, leading, "the leading axes of logits")
    if candidate_ids is None:
        candidate_ids = torch.empty(*leading, 0, dtype=torch.int64, device=logits.device)
    # Ids are checked only where they count: masked positions hold padding, which may repeat or lie outside the
    # vocabulary.
    if sampled_ids is not None:
        check_shape("sampled_ids", sampled_ids, leading, "the leading axes of logits")
        check_ids("sampled_ids", _counted(sampled_ids, mask), vocabulary, check_values=check_values)
    check_last_axis("candidate_ids", candidate_ids, leading, "the leading axes of logits")
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
    """The ids to check: on a CPU those that count, else all, because selecting by a mask would make the host wait."""
    return ids[mask] if mask is not None and ids.device.type == "cpu" else ids


def _flat_ids(ids: Tensor, mask: Tensor | None, leading: tuple[int, ...]) -> Tensor:
    """[N, ...] int64 ids, with 0, a valid id, in place of padding."""
    if mask is not None:
        shaped = mask.reshape(*leading, *(1 for _ in ids.shape[len(leading) :]))
        ids = torch.where(shaped, ids, torch.zeros_like(ids))
    return ids.reshape(math.prod(leading), *ids.shape[len(leading) :]).long()


class _TokenScores(torch.autograd.Function):
    """Outputs: candidates [N, K]; sampled, log_tail, log_z, entropy, mean [N]. The backward pass reads logits again."""

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
        rows = torch.empty(len(ScoreStatistic), len(logits), dtype=dtype, device=logits.device)
        for block in row_blocks(logits):
            y = None if sampled_ids is None else sampled_ids[block]
            picked[block], rows[:, block] = score_rows(logits[block], ids[block], y, temperature, dtype)
        if check:
            check_rows_finite("logits", logits, rows[ScoreStatistic.LOG_Z], mask)
        if mask is not None:
            rows = torch.where(mask, rows, torch.zeros_like(rows))
            picked = torch.where(mask.unsqueeze(-1), picked, torch.zeros_like(picked))
        sampled, log_tail, log_z, entropies, mean = rows.unbind(0)
        ctx.save_for_backward(logits, ids, sampled_ids, mask, log_z, log_tail)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # outputs that no loss used arrive as None and cost no [N, K] of zeros
        ctx.mark_non_differentiable(entropies)
        return picked, sampled, log_tail, log_z, entropies, mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        d_picked: Tensor | None,
        d_sampled: Tensor | None,
        d_tail: Tensor | None,
        d_z: Tensor | None,
        _: None,
        d_mean: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        logits, ids, sampled_ids, mask, log_z, log_tail = ctx.saved_tensors
        arriving = arriving_gradients(ids.shape[1], log_z, log_tail, d_picked, d_sampled, d_tail, d_z, d_mean)
        out = torch.empty_like(logits)
        for block in row_blocks(logits):
            log_p = log_probs(logits[block], log_z[block], ctx.temperature)
            y = None if sampled_ids is None else sampled_ids[block]
            gradient = score_rows_gradient(log_p, ids[block], y, log_tail[block], *(g[block] for g in arriving))
            chosen = select_rows(mask, block)
            gradient = gradient if chosen is None else torch.where(chosen, gradient, torch.zeros_like(gradient))
            out[block] = gradient.div_(ctx.temperature)
        return out, None, None, None, None, None


def score_rows(
    logits: Float[Tensor, "n V"],
    ids: Int[Tensor, "n K"],
    sampled_ids: Int[Tensor, "n 1"] | None,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "n K"], Float[Tensor, "5 n"]]:
    """Log-probs of a few rows at `ids`, and their statistics in the order of `ScoreStatistic`.

    The row SAMPLED is 0 if there are no sampled ids.
    """
    scaled = logits.to(dtype)
    log_z = torch.logsumexp(scaled if temperature == 1.0 else scaled / temperature, dim=-1)
    log_p = log_probs(logits, log_z, temperature)
    picked = log_p.gather(1, ids)
    sampled = torch.zeros_like(log_z) if sampled_ids is None else log_p.gather(1, sampled_ids).squeeze(1)
    entropies, mean = entropy(log_p), log_p.mean(-1)
    # Last, because it overwrites the log-probs. A logsumexp over the complement, because log(1 - mass) would be nothing
    # but rounding error where the tail is tiny. Without candidates everything is outside.
    outside = log_p.scatter_(1, ids, -torch.inf) if ids.shape[1] else None
    log_tail = torch.zeros_like(log_z) if outside is None else outside.logsumexp(-1)
    return picked, torch.stack([sampled, log_tail, log_z, entropies, mean])


def arriving_gradients(
    candidates: int,
    log_z: Tensor,
    log_tail: Tensor,
    d_picked: Tensor | None,
    d_sampled: Tensor | None,
    d_tail: Tensor | None,
    d_z: Tensor | None,
    d_mean: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients that `score_rows_gradient` takes, from those that arrive at the outputs (None where none does).

    Returns gradients of picked [N, K], sampled, tail and mean [N], and the factor of p [N]. `candidates` is K, even if
    no gradient arrives at the candidates.
    """
    zeros = torch.zeros_like(log_z)
    d_picked = zeros.new_zeros(len(zeros), 0) if d_picked is None else d_picked
    d_sampled = zeros if d_sampled is None else d_sampled
    # log_tail is constant if the tail is empty (-inf) or holds everything (0).
    d_tail = zeros if d_tail is None or not candidates else torch.where(log_tail.isneginf(), zeros, d_tail)
    d_mean = zeros if d_mean is None else d_mean
    # The gradient of log p_i is one_hot(i) - p, so p is multiplied once by minus the sum of all arriving gradients.
    p_factor = (zeros if d_z is None else d_z) - d_picked.sum(-1) - d_sampled - d_tail - d_mean
    return d_picked, d_sampled, d_tail, d_mean, p_factor


def score_rows_gradient(
    log_p: Float[Tensor, "n V"],
    ids: Int[Tensor, "n K"],
    sampled_ids: Int[Tensor, "n 1"] | None,
    log_tail: Float[Tensor, " n"],
    d_picked: Float[Tensor, "n M"],
    d_sampled: Float[Tensor, " n"],
    d_tail: Float[Tensor, " n"],
    d_mean: Float[Tensor, " n"],
    p_factor: Float[Tensor, " n"],
) -> Float[Tensor, "n V"]:
    """Gradient of a few rows with respect to logits / temperature; overwrites `log_p`."""
    # The mean gives every id the same share; its part on p is in `p_factor`.
    share = (d_mean / log_p.shape[-1]).unsqueeze(-1)
    gradient = torch.addcmul(share, log_p.exp(), p_factor.unsqueeze(-1))
    if ids.shape[1]:
        # d log_tail / d logit_i = p_i / tail outside the candidates, on top of its part in `p_factor`. For an empty
        # tail `arriving_gradients` has set d_tail to 0; a finite log_tail keeps -inf - -inf from turning it into NaN.
        finite_tail = torch.where(log_tail.isneginf(), torch.zeros_like(log_tail), log_tail)
        outside = log_p.scatter_(1, ids, -torch.inf).sub_(finite_tail.unsqueeze(-1)).exp_()
        gradient.addcmul_(outside, d_tail.unsqueeze(-1))
    if d_picked.shape[1]:
        gradient.scatter_add_(1, ids, d_picked)
    # Added separately, because y may be a candidate as well.
    if sampled_ids is not None:
        gradient.scatter_add_(1, sampled_ids, d_sampled.unsqueeze(-1))
    return gradient
