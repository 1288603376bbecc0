"""TIDE: a bounded penalty where the student is overconfident, and the teacher's top k where it lacks their mass.

    excess    d = log T(y) - log S(y) < 0 among the worst `excess_share`:   A = 2 (sqrt(T(y) / S(y)) - 1),  in (-2, 0)
    deficit   s = max(0, sum_v p(v) (log p(v) - log S(v))) among the largest `deficit_share`, p the teacher's top k
              made to sum to 1:   loss - weight sum_v p(v) log S(v), differentiable through S

Other tokens have no loss and stay in the denominator. S is not renormalised, so mass outside the teacher's top k is
charged.

Source: arXiv 2608.09836 and its released code; evidence: code executed (yzc-666/TIDE b54a9e1). One difference: the code
takes quantiles over the rows that one worker scores, so thresholds depend on the layout of batches; here they are taken
over each response. Defaults are the code's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings
from student.data.needs import SCORES, SCORES_AT_TEACHER, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class TideSettings(TokenRewardSettings):
    """Settings of TIDE."""

    k: int = Field(16, ge=1, le=4096, description="Number k of the teacher's most likely ids per position.")
    excess_share: float = Field(
        0.2, ge=0, le=1, description="Maximum share of each response's tokens that are penalised."
    )
    deficit_share: float = Field(
        0.2, ge=0, le=1, description="Maximum share of each response's tokens at which the teacher's top k is learnt."
    )
    injection: float = Field(
        1.0, ge=0, description="Weight of the loss on the teacher's top k; it affects the length of answers."
    )


class Tide(TokenReward[TideSettings]):
    """A bounded penalty where the student is overconfident, and the teacher's top k where it lacks mass (TIDE)."""

    traits = replace(TokenReward.traits, ranks_tokens=True)

    def needs(self) -> Needs:
        """The teacher's top k, and the student there."""
        signal = SignalNeed(TEACHER, PayloadSpec.topk(self.settings.k), self.settings.teacher_temperature)
        return Needs(signals=(signal,), student=frozenset({SCORES, SCORES_AT_TEACHER}))

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """The penalties; metric excess_share."""
        reward = excess(teacher - student, batch.row, batch.mask, self.settings.excess_share)
        return reward, {"excess_share": ((reward < 0).sum(), batch.mask.sum())}

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Both branches; metric deficit_share."""
        import torch

        output = super().token_losses(batch)
        k = self.settings.k
        values = have(batch.signal(PayloadKind.TOPK).values, "teacher's log-probs")[:, :k]
        # Masked positions may hold -inf, whose softmax is NaN, and a NaN loss stays NaN whatever its weight.
        theirs = torch.where(batch.mask[:, None], values, torch.zeros_like(values)).log_softmax(-1)
        ours = have(have(batch.student.scores_at_teacher, "scores").candidates, "log-probs")[:, :k]
        zero = torch.zeros_like(ours[:, 0])
        missing = (theirs.exp() * (theirs - ours.detach())).sum(-1)
        missing = torch.where(batch.mask, missing, zero)
        chosen = worst(missing, batch.row, batch.mask, self.settings.deficit_share) & (missing > 0)
        injected = torch.where(chosen, -(theirs.exp() * ours).sum(-1), zero)
        metrics = {**output.metrics, "deficit_share": (chosen.sum(), batch.mask.sum())}
        return TermOutput(have(output.loss, "loss") + self.settings.injection * injected, metrics=metrics)


def excess(
    ratio: Float[Tensor, " n"], row: Int[Tensor, " n"], mask: Bool[Tensor, " n"], share: float
) -> Float[Tensor, " n"]:
    """[N] penalties 2 (exp(d / 2) - 1) of the tokens with d < 0 among the worst `share` of their response, else 0."""
    import torch

    chosen = worst(-ratio, row, mask, share) & (ratio < 0)
    return torch.where(chosen, 2.0 * (ratio / 2.0).expm1(), torch.zeros_like(ratio))


def worst(
    score: Float[Tensor, " n"], row: Int[Tensor, " n"], mask: Bool[Tensor, " n"], share: float
) -> Bool[Tensor, " n"]:
    """[N] tokens whose score is at least the (1 - share) quantile of their response, linearly interpolated."""
    import torch

    if share == 0:
        return torch.zeros_like(mask)
    chosen = torch.zeros_like(mask)
    for index in row.unique().tolist():
        mine = mask & (row == index)
        if mine.any():
            chosen |= mine & (score >= torch.quantile(score[mine], 1.0 - share))
    return chosen
