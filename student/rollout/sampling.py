"""Draw one token per row from logits, by inverse CDF with the row's own uniform; pick the most likely ids."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
        valid_vocab: ids from here on are padding rows of the head and are never drawn.

    Returns:
        ids [B] int64 and their log-probs [B] float32 in nats, at the temperature (at 1 for greedy).
    """
    scaled = logits[:, :valid_vocab].float()
    if temperature > 0:
        scaled = scaled / temperature
    logp = torch.log_softmax(scaled, dim=-1)
    if temperature == 0:
        ids = logp.argmax(dim=-1)
    else:
        cdf = logp.double().exp().cumsum(dim=-1)
        # Scaling the uniform by the total keeps the draw inside the vocabulary whatever the rounding of the sum.
        target = (uniform.to(cdf.device) * cdf[:, -1]).unsqueeze(-1)
        ids = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp_(max=valid_vocab - 1)
    return ids, logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def most_likely(scores: Float[Tensor, "b v"], k: int, keep: tuple[int, ...] = ()) -> Int[Tensor, "b k"]:
    """Ids of the k largest scores, descending; `keep` are among them, in place of the least likely ones.

    Which ids these are depends on the prefix alone, not on what was sampled, so that estimators on them stay unbiased.

    Args:
        scores: [B, V] logits or log-probs.
        k: how many ids, more than `keep` has.
        keep: ids to keep, each once.
    """
    if not keep:
        return scores.topk(k, dim=-1).indices
    raised = scores.clone()
    raised[:, list(keep)] = torch.inf
    ids = raised.topk(k, dim=-1).indices
    return ids.gather(-1, scores.gather(-1, ids).argsort(dim=-1, descending=True, stable=True))
