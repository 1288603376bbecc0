"""IW-OPD: a token weighs the less, the more of the response's disagreement lies before it.

    d_t = log T(y_t) - log S(y_t),   w_t = 1 + gamma (1 - sum_{k<t} |d_k| / sum_k |d_k|),   A_t = w_t d_t

The first token has weight 1 + gamma, a late one about 1. The released code does not normalise the weights: their mean
is 1 + gamma / 2 if disagreement is spread evenly, so the method also raises the effective learning rate. `normalise`
removes that by dividing by the mean weight of the response. Weights depend on the whole response, so windows change
them.

Source: arXiv 2606.22600; evidence: two released implementations read (the authors' and TRL's), gamma 0.5 in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class IwOpdSettings(TokenRewardSettings):
    """Settings of IW-OPD."""

    gamma: float = Field(
        0.5, ge=0, le=10, description="Additional weight of the first token; later tokens get a part of it."
    )
    normalise: bool = Field(
        False,
        description="Divide the weights by their mean over the response, so that the effective learning rate does not "
        "rise.",
    )


class IwOpd(TokenReward[IwOpdSettings]):
    """Sampled distillation with more weight on early tokens."""

    traits = replace(TokenReward.traits, ranks_tokens=True)

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """See the module; metric mean_weight."""
        ratio = teacher - student
        weights = prefix_weights(ratio, batch.row, batch.mask, self.settings.gamma, normalise=self.settings.normalise)
        return weights * ratio, {"mean_weight": ((weights * batch.mask).sum(), batch.mask.sum())}


def prefix_weights(
    ratio: Float[Tensor, " n"], row: Int[Tensor, " n"], mask: Bool[Tensor, " n"], gamma: float, *, normalise: bool
) -> Float[Tensor, " n"]:
    """[N] weights of the module's formula; 1 where masked.

    Args:
        ratio: [N] log T - log S, nats.
        row: [N] index of the response, ascending.
        mask: [N] tokens that count.
        gamma: additional weight of the first token.
        normalise: give the weights of each response mean 1.
    """
    import torch

    if not len(ratio):
        return ratio
    size = torch.where(mask, ratio.abs(), torch.zeros_like(ratio)).double()
    rows = int(row.max()) + 1
    total = torch.zeros(rows, dtype=torch.float64, device=row.device).index_add_(0, row, size)
    # One cumulative sum over all rows, minus that of the rows before; in float64, because large sums cancel.
    before = size.cumsum(0) - size - (total.cumsum(0) - total)[row]
    weights = 1.0 + gamma * (1.0 - before / total[row].clamp(min=1e-8))
    if normalise:
        count = torch.zeros_like(total).index_add_(0, row, mask.double())
        summed = torch.zeros_like(total).index_add_(0, row, torch.where(mask, weights, torch.zeros_like(weights)))
        weights = weights * (count / summed.clamp(min=1e-8))[row]
    return torch.where(mask, weights, torch.ones_like(weights)).to(ratio.dtype)
