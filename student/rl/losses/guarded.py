"""Policy losses that guard, mix or drop ratios: StableReinforce, DHPO, MiniRL and the REC family.

    stable_reinforce   the clipped loss on rho = exp(clamp(log rho, -log 1000, log 1000))
    dhpo               loss = -(w clip(rho_t) + (1 - w) clip(s)) A,   s = (rho_1 ... rho_T)^(1/T)
    minirl             loss = -sg(min(pi / mu, cap)) keep A log pi,   keep by the one-sided rule on pi / pi_old
    rec                loss = -keep A log pi,   keep by `rule` on rho

    one_sided   A >= 0: rho <= 1 + clip_high;   A <= 0: rho >= 1 - clip_low
    two_sided   both bounds for every token
    ring        two_sided, or far out: A >= 0 and rho <= 1 - far_low, A <= 0 and rho >= 1 + far_high

All are REINFORCE on policy; metric dropped_share counts the tokens that are not kept. Sources: the released code of
R1-Reward; DHPO, arXiv 2601.05607 (notes; its entropy-dependent w is not offered); MiniRL, 2512.01374; REC, the released
code of Trinity-RFT.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.learning.terms import TermOutput, TokenBatch
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings
from student.rl.losses.ratios import at_grain

if TYPE_CHECKING:
    from torch import Tensor

_LOW, _HIGH = "The ratio is bounded at 1 - clip_low.", "The ratio is bounded at 1 + clip_high."
_FARTHEST = math.log(1000.0)


class StableReinforce(PolicyGradient):
    """StableReinforce; see the module for the formula. Its filter is advantage outliers."""

    settings_type = ClippedSettings
    evidence: ClassVar[str] = "text and code"

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module; also metric clamped_share."""
        output = super().surrogate(log_ratio.clamp(-_FARTHEST, _FARTHEST), advantage, live, batch)
        far = batch.mask & (log_ratio.detach().abs() > _FARTHEST)
        return TermOutput(output.loss, metrics=output.metrics | {"clamped_share": (far.sum(), batch.mask.sum())})


class DhpoSettings(PolicyGradientSettings):
    """Settings of DHPO."""

    mix: float = Field(0.5, ge=0, le=1, description="w: 1 is the ratio by token, 0 by sequence.")
    clip_low: float = Field(0.2, gt=0, le=1, description="The ratio of a token is at least 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The ratio of a token is at most 1 + clip_high.")
    sequence_low: float = Field(0.2, gt=0, le=1, description="The ratio of a sequence is at least 1 - this.")
    sequence_high: float = Field(0.2, gt=0, description="The ratio of a sequence is at most 1 + this.")


class Dhpo(PolicyGradient):
    """DHPO; see the module for the formula."""

    settings_type = DhpoSettings
    settings: DhpoSettings
    evidence: ClassVar[str] = "inferred"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "sequence_low", "sequence_high")

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module; metric clipped_share counts tokens with either part clipped."""
        s = self.settings
        token, sequence = log_ratio.exp(), at_grain(log_ratio, batch, "sequence").exp()
        near = token.clamp(1.0 - s.clip_low, 1.0 + s.clip_high)
        whole = sequence.clamp(1.0 - s.sequence_low, 1.0 + s.sequence_high)
        bites = batch.mask & ((near != token) | (whole != sequence))
        loss = -(s.mix * near + (1.0 - s.mix) * whole) * advantage
        return TermOutput(loss, metrics={"clipped_share": (bites.sum(), batch.mask.sum())})


class RecSettings(PolicyGradientSettings):
    """Settings of the REC family."""

    rule: Literal["one_sided", "two_sided", "ring"] = Field("one_sided", description="Which tokens are kept.")
    clip_low: float = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float = Field(0.2, gt=0, description=_HIGH)
    far_low: float = Field(0.6, gt=0, le=1, description="Rule ring: tokens below 1 - far_low are pulled back.")
    far_high: float = Field(2.0, gt=0, description="Rule ring: tokens above 1 + far_high are pulled back.")


class Rec(PolicyGradient):
    """The REC family; see the module for the formula."""

    settings_type = RecSettings
    settings: RecSettings
    evidence: ClassVar[str] = "text and code"

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module."""
        keep = self._kept(log_ratio.detach().exp(), advantage)
        dropped = batch.mask & ~keep
        return TermOutput(
            -keep.to(live.dtype) * advantage * live, metrics={"dropped_share": (dropped.sum(), batch.mask.sum())}
        )

    def _kept(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        s = self.settings
        under, over = ratio <= 1.0 + s.clip_high, ratio >= 1.0 - s.clip_low
        if s.rule == "one_sided":
            return under.where(advantage >= 0, over)
        back = (ratio <= 1.0 - s.far_low).where(advantage >= 0, ratio >= 1.0 + s.far_high)
        return (under & over) | back if s.rule == "ring" else under & over


class MinirlSettings(PolicyGradientSettings):
    """Settings of MiniRL."""

    ratio_to: Literal["behaviour", "old"] = Field("old", description="What the rule of dropping compares with.")
    clip_low: float = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float = Field(0.2, gt=0, description=_HIGH)
    cap: float = Field(2.0, gt=0, description="Largest weight for the mismatch with the policy that sampled.")


class Minirl(PolicyGradient):
    """MiniRL; see the module for the formula."""

    settings_type = MinirlSettings
    settings: MinirlSettings
    evidence: ClassVar[str] = "text"

    @property
    def why_not_stale(self) -> str:
        """Its own weight corrects for the policy that sampled."""
        return ""

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module; also metric capped_share."""
        s, ratio, count = self.settings, log_ratio.detach().exp(), batch.mask.sum()
        keep = (ratio <= 1.0 + s.clip_high).where(advantage > 0, (advantage == 0) | (ratio >= 1.0 - s.clip_low))
        gap = (live.detach() - batch.behaviour_logp.to(live.dtype)).where(batch.mask, live.new_zeros(()))
        weight = gap.exp().clamp(max=s.cap)
        dropped, capped = batch.mask & ~keep, batch.mask & (gap.exp() > s.cap)
        return TermOutput(
            -weight * keep.to(live.dtype) * advantage * live,
            metrics={"dropped_share": (dropped.sum(), count), "capped_share": (capped.sum(), count)},
        )
