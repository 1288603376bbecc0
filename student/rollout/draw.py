"""Draws one token per row from logits, by inverse CDF with the row's own uniform number, and picks the top-k ids."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 256


def draw(
    logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"], temperature: float, valid_vocab: int
) -> tuple[Int[Tensor, " b"], Float[Tensor, " b"]]:
    """Sample from softmax(logits / temperature) over the first `valid_vocab` ids; temperature 0 is greedy.

    Inverse CDF: the smallest id whose cumulative probability exceeds the uniform. A row's token depends on its
    logits and its uniform alone, so batching cannot change it beyond rounding of the logits.

    Args:
        logits: [B, V] any float dtype.
        uniform: [B] float64 in (0, 1).
        temperature: divides the logits.
        valid_vocab: ids from this one on are padding rows of the head and are never drawn.

    Returns:
        ids [B] int64 and their log-probs [B] float32 in nats, at the temperature (at 1 for greedy). If logits are NaN
        or infinite, the id is arbitrary and the log-prob NaN.
    """
    scaled = logits[:, :valid_vocab].float()
    if temperature > 0:
        scaled = scaled / temperature
    logp = torch.log_softmax(scaled, dim=-1)
    ids = logp.argmax(dim=-1) if temperature == 0 else _invert(logp.exp(), uniform.to(logp.device))
    return ids, logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _invert(p: Float[Tensor, "b v"], uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The smallest id whose cumulative weight exceeds `uniform` times the total.

    Found in two steps, first the block and then the id in it, so that float64 is needed only for the sums of blocks and
    for one block, not for the whole vocabulary.
    """
    blocks = torch.nn.functional.pad(p, (0, -p.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1).double().cumsum(-1)
    target = uniform * sums[:, -1]  # relative to the rounded sum instead of 1, so that the draw falls inside a block
    block = torch.searchsorted(sums, target.unsqueeze(-1), right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(p), device=p.device)
    inside = blocks[rows, block.squeeze(-1)].double().cumsum(-1)
    # A block's float32 sum may round above the float64 sum of its parts; the excess goes to its last id with weight.
    left = torch.minimum(target.unsqueeze(-1) - before, inside[:, -1:] * (1 - 1e-15))
    ids = (block * _BLOCK + torch.searchsorted(inside, left, right=True)).squeeze(-1)
    return ids.clamp_(max=p.shape[-1] - 1)  # for a row of NaN, in which no sum exceeds the target


def draw_mixed(
    logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"], temperatures: Sequence[float], valid_vocab: int
) -> tuple[Int[Tensor, " b"], Float[Tensor, " b"]]:
    """`draw` for rows with different temperatures, which are given on the host."""
    levels = sorted(set(temperatures))
    if len(levels) == 1:
        return draw(logits, uniform, levels[0], valid_vocab)
    ids = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    logp = torch.zeros(len(logits), device=logits.device)
    for level in levels:
        chosen = torch.tensor([one == level for one in temperatures], device=logits.device)
        ids[chosen], logp[chosen] = draw(logits[chosen], uniform[chosen], level, valid_vocab)
    return ids, logp


def most_likely(scores: Float[Tensor, "b v"], k: int, keep: tuple[int, ...] = ()) -> Int[Tensor, "b k"]:
    """Ids of the k largest scores, in descending order; ids of `keep` replace the least likely ones.

    The choice depends only on the prefix, not on the token that was sampled, so estimators on these ids stay unbiased.

    Args:
        scores: [B, V] logits or log-probs.
        k: number of ids, more than `keep` has.
        keep: ids that must be among them, without duplicates.
    """
    if not keep:
        return scores.topk(k, dim=-1).indices
    raised = scores.clone()
    raised[:, list(keep)] = torch.inf
    ids = raised.topk(k, dim=-1).indices
    return ids.gather(-1, scores.gather(-1, ids).argsort(dim=-1, descending=True, stable=True))
