"""The denominators of a training step: the one place that decides what a token's loss is divided by.

    weights = token_weights({"opd": LossWeights(mask)}, group=data_parallel_group)["opd"]    # once per step
    loss = (weights[micro_batch] * per_token).sum()                                   # per micro-batch, then backward

A term's weights are computed from all its tokens in the step, over all ranks and accumulation steps, before the step is
cut into micro-batches. The objective therefore depends on neither the cut nor padding nor the number of ranks, provided
that nothing else divides. One all-reduce serves all terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch import distributed as dist

from opd.maths.checks import check_ids, check_integer, check_mask, check_shape, describe

#: token_mean: every token has the same weight. sequence_mean: every sequence has the same weight, shared among its
#: tokens. sequence_sum: tokens are summed within a sequence, and each sum is divided by the same `length`; then the
#: mean over sequences. balanced: token mean within a stratum, strata weighted by their share of the sequences.
MODES = ("token_mean", "sequence_mean", "sequence_sum", "balanced")


@dataclass(frozen=True, slots=True, eq=False)
class LossWeights:
    """The tokens of one term on this rank in this step.

    Attributes:
        mask: [N] bool over all tokens of the step, in any fixed order; True where the term counts.
        mode: one of `MODES`.
        sequence: [N] index of the token's sequence in [0, num_sequences); required by all modes but token_mean. A
            sequence must not be split between ranks.
        num_sequences: number of sequences on this rank.
        stratum: [N] index of the token's stratum in [0, num_strata), for "balanced": for example the sign of the
            advantage (arXiv 2605.04077), the teacher, or the task. The same for all tokens of a sequence.
        num_strata: number of strata, the same on every rank.
        length: for "sequence_sum", what each sequence's sum is divided by, in tokens: 1, or the length limit, so that a
            truncated sequence keeps exactly the gradients of its tokens (arXiv 2503.20783).
    """

    mask: Bool[Tensor, " N"]
    mode: str = "token_mean"
    sequence: Int[Tensor, " N"] | None = None
    num_sequences: int = 0
    stratum: Int[Tensor, " N"] | None = None
    num_strata: int = 1
    length: int = 1


def token_weights(
    terms: Mapping[str, LossWeights], *, group: dist.ProcessGroup | None = None, gradient_reduction: str = "mean"
) -> dict[str, Float[Tensor, " N"]]:
    """The weight of every token in its term: the loss is sum(weight * per-token loss), with no further division.

    Args:
        terms: the terms by name; the same names and modes in the same order on every rank.
        group: the data-parallel ranks, None for the default group. Ranks communicate only if torch.distributed is
            initialised.
        gradient_reduction: how gradients are reduced over ranks: "mean" (DDP, FSDP), in which case weights are
            multiplied by the number of ranks, or "sum".

    Returns:
        [N] float32 per term, zero where masked. A term without tokens gets zeros, so its loss and gradient are zero.

    Raises:
        ValueError: if a mode or the reduction is unknown, a mask is not [N] bool, or indices are missing, have the
            wrong shape or are out of range (the range is checked on CPU only).
    """
    if gradient_reduction not in ("mean", "sum"):
        raise ValueError(f"gradient_reduction must be mean or sum, but is {gradient_reduction!r}.")
    for name, term in terms.items():
        _check(name, term)
    if not terms:
        return {}
    lengths = {name: _sequence_lengths(term) for name, term in terms.items()}
    # One tensor for all terms: one all-reduce, in an order that all ranks share.
    counts = torch.cat([_local_counts(term, lengths[name]) for name, term in terms.items()])
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts, group=group)
        ranks = dist.get_world_size(group)
    factor = ranks if gradient_reduction == "mean" else 1
    sizes = [2 * term.num_strata for term in terms.values()]
    return {
        name: factor * _weights(term, lengths[name], found)
        for (name, term), found in zip(terms.items(), counts.split(sizes), strict=True)
    }


def _sequence_lengths(term: LossWeights) -> Tensor:
    """[num_sequences] tokens of the term in each sequence, float64: float32 counts are exact up to 2^24 only."""
    lengths = torch.zeros(term.num_sequences, dtype=torch.float64, device=term.mask.device)
    return lengths if term.sequence is None else lengths.scatter_add_(0, term.sequence.long(), term.mask.double())


def _local_counts(term: LossWeights, lengths: Tensor) -> Tensor:
    """[2 * num_strata]: the tokens in each stratum, then the sequences in each stratum that have any tokens."""
    counts = torch.zeros(2, term.num_strata, dtype=torch.float64, device=term.mask.device)
    stratum = _strata(term)
    counts[0].scatter_add_(0, stratum, term.mask.double())
    if term.sequence is not None:
        # A token contributes 1 / length of its sequence, so a sequence adds up to one. The clamp keeps a sequence
        # without tokens of the term, 0 / 0, from making the sum over all ranks NaN.
        share = term.mask.double() / lengths.clamp(min=1)[term.sequence.long()]
        counts[1].scatter_add_(0, stratum, share)
    return counts.flatten()


def _weights(term: LossWeights, lengths: Tensor, found: Tensor) -> Tensor:
    tokens, sequences = found.view(2, term.num_strata)
    if term.mode == "token_mean":
        weights = 1.0 / tokens.sum().clamp(min=1).expand(len(term.mask))
    elif term.mode == "balanced":
        # A stratum's share of the sequences, divided among its tokens.
        stratum = _strata(term)
        weights = (sequences / sequences.sum().clamp(min=1) / tokens.clamp(min=1))[stratum]
    elif term.sequence is not None and term.mode == "sequence_mean":
        weights = 1.0 / (sequences.sum().clamp(min=1) * lengths.clamp(min=1)[term.sequence.long()])
    else:
        weights = 1.0 / (sequences.sum().clamp(min=1) * term.length).expand(len(term.mask))
    # To float32 only here: the counts that are divided above are exact in float64.
    return torch.where(term.mask, weights, torch.zeros_like(weights)).float()


def _strata(term: LossWeights) -> Tensor:
    zeros = torch.zeros(len(term.mask), dtype=torch.int64, device=term.mask.device)
    return zeros if term.stratum is None else term.stratum.long()


def _check(name: str, term: LossWeights) -> None:
    if term.mode not in MODES:
        raise ValueError(f"mode of term {name!r} must be one of {', '.join(MODES)}, but is {term.mode!r}.")
    check_mask(f"mask of term {name!r}", term.mask, tuple(term.mask.shape), "itself")
    if term.mask.ndim != 1:
        raise ValueError(f"{describe(f'mask of term {name!r}', term.mask)} must have shape [N]; flatten it.")
    check_integer(f"num_strata of term {name!r}", term.num_strata, 1)
    check_integer(f"num_sequences of term {name!r}", term.num_sequences, 0)
    check_integer(f"length of term {name!r}", term.length, 1)
    # A rank may have no sequences, and so no tokens, while others have some.
    if term.mode != "token_mean" and (term.sequence is None or term.num_sequences < min(1, len(term.mask))):
        raise ValueError(f"term {name!r} has mode {term.mode!r}, which needs sequence and num_sequences.")
    if term.mode == "balanced" and term.stratum is None:
        raise ValueError(f"term {name!r} has mode 'balanced', which needs stratum and num_strata.")
    limits = ("sequence", term.sequence, term.num_sequences), ("stratum", term.stratum, term.num_strata)
    for what, index, limit in limits:
        if index is not None:
            check_shape(f"{what} of term {name!r}", index, tuple(term.mask.shape), "mask")
            check_ids(
                f"{what} of term {name!r}", index, limit, whole=f"num_{'sequences' if what == 'sequence' else 'strata'}"
            )
