"""TrOPD: follow the teacher on tokens that it could have written itself, and treat the others differently.

A token is in the trust region with probability P = min(T(y) / S(y), 1), as speculative decoding would accept it:

    loss = P * [-sg(log T(y) - log S(y)) log S(y)]  +  (1 - P) * outlier
    outlier:  mask         0
              clip         the same policy gradient with the log-ratio clipped at -`clip`
              forward_kl   KL(T || S) over the teacher's top k and a tail bucket

The paper draws a Bernoulli variable for the region, and sums the forward KL over the top k only. Here the expectation
of that variable weights both sides, which has the same mean and less variance. The paper's guidance by prefixes of
teacher answers is not part of this term. Source: arXiv 2606.01249.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings
from student.data.needs import SCORES, SCORES_AT_TEACHER, TEACHER, Needs, SignalNeed
from student.data.token_batch import have
from student.plugin.terms import TermOutput

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class TropdSettings(TokenRewardSettings):
    """Settings of TrOPD."""

    outlier: Literal["mask", "clip", "forward_kl"] = Field(
        "forward_kl",
        description="What tokens outside the trust region learn from: mask, nothing; clip, the clipped log-ratio; "
        "forward_kl, the forward KL.",
    )
    clip: float = Field(5.0, gt=0, description="With outlier clip: largest negative log-ratio in nats.")
    k: int = Field(
        64, ge=1, le=4096, description="With outlier forward_kl: number of the teacher's most likely ids per position."
    )


class Tropd(TokenReward[TropdSettings]):
    """Sampled distillation inside a trust region, with the forward KL outside (TrOPD)."""

    def needs(self) -> Needs:
        """Sampled log-probs, or the teacher's top k for the forward KL."""
        if self.settings.outlier != "forward_kl":
            return super().needs()
        signal = SignalNeed(TEACHER, PayloadSpec.topk(self.settings.k), self.settings.teacher_temperature)
        return Needs(signals=(signal,), student=frozenset({SCORES, SCORES_AT_TEACHER}))

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """The policy-gradient part; metric trusted_share."""
        import torch

        ratio = teacher - student
        trust = ratio.clamp(max=0.0).exp()
        # If T(y) = 0 the trust is 0, and 0 times an infinite reward would be NaN.
        reward = torch.where(trust > 0, trust * ratio.clamp(min=-1e4), torch.zeros_like(ratio))
        if self.settings.outlier == "clip":
            reward = reward + (1.0 - trust) * ratio.clamp(min=-self.settings.clip)
        inside = torch.where(batch.mask, trust, torch.zeros_like(trust)).sum()
        return reward, {"trusted_share": (inside, batch.mask.sum())}

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Both parts, weighted by P and 1 - P."""
        import torch

        output = super().token_losses(batch)
        if self.settings.outlier != "forward_kl":
            return output
        signal, scores = batch.signal(PayloadKind.TOPK), have(batch.student.scores, "scores")
        ratio = have(signal.sampled, "sampled log-probs") - scores.sampled.detach()
        trust = torch.where(batch.mask, ratio.clamp(max=0.0).exp(), torch.ones_like(ratio))
        forward = maths.topk_divergence(
            have(batch.student.scores_at_teacher, "scores at the teacher's ids"),
            have(signal.ids, "teacher's ids"),
            have(signal.values, "teacher's log-probs"),
            signal.log_tail,
            kind="forward_kl",
            mask=batch.mask,
        )
        return dataclasses.replace(output, loss=have(output.loss, "loss") + (1.0 - trust) * forward.per_token)
