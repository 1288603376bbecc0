"""REINFORCE with a bounded importance weight that is detached: unlike with a clip, every token keeps a gradient.

    loss_t = -sg(w_t) A_t log pi(y_t),   w from the importance ratio rho (see the subclasses)

    cispo      w = clip(rho, floor, cap)                                                            (CISPO)
    dispo      w = clip(rho, bounds of right answers where A > 0, of wrong ones elsewhere)          (DISPO)
    topr       w = 1 where A > 0, clip(rho, 0, 1) elsewhere                                         (TOPR)
    minpro     w = clip(rho_t min_{i < t} rho_i, 1 - clip_low, 1 + clip_high)                       (MinPRO)

Bounds are absolute values of the ratio, except minpro's, which are distances from 1. On policy all are REINFORCE.
Metric tapered_share is the share of tokens whose weight differs from their ratio. Sources: CISPO, arXiv 2506.13585, cap
as TRL and ScaleRL have it; DISPO, 2602.00983, bounds from notes on it; TOPR, 2503.14286 (the ratio of the whole
response; ratio token is Trinity-RFT's); MinPRO, 2601.22718.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from student.data.token_batch import TokenBatch
from student.plugin.terms import TermOutput
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings
from student.rl.losses.ratios import least_before
from student.rl.losses.settings import PolicyGradientSettings_co

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


_CLIPS = ("clip_low", "clip_high", "dual_clip")


class WeightedGradient(PolicyGradient[PolicyGradientSettings_co]):
    """Base of losses with a detached weight: subclasses give `weight`."""

    unread: ClassVar[tuple[str, ...]] = _CLIPS

    def weight(
        self, log_ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"], batch: TokenBatch
    ) -> Float[Tensor, " n"]:
        """[N] the weight of each token, from the detached log-ratio."""
        raise TypeError(f"{type(self).__name__} does not implement weight")

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metric tapered_share."""
        known = log_ratio.detach()
        # From the detached ratio: where the weight is bounded, log pi keeps its gradient.
        weight = self.weight(known, advantage, batch)
        tapered = batch.mask & ((weight - known.exp()).abs() > 1e-4)  # rounding aside
        return TermOutput(-weight * advantage * live, metrics={"tapered_share": (tapered.sum(), batch.mask.sum())})


class CispoSettings(PolicyGradientSettings):
    """Settings of CISPO."""

    floor: float = Field(0.0, ge=0, description="Minimum weight, as a value of the ratio.")
    cap: float = Field(5.0, gt=0, description="Maximum weight, as a value of the ratio.")


class Cispo(WeightedGradient[CispoSettings]):
    """REINFORCE with a capped importance weight (CISPO)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ("cap",)

    def weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] rho clipped to [floor, cap]."""
        return log_ratio.exp().clamp(self.settings.floor, self.settings.cap)


class DispoSettings(PolicyGradientSettings):
    """Settings of DISPO."""

    right_floor: float = Field(0.8, ge=0, description="Minimum weight of tokens with A > 0.")
    right_cap: float = Field(11.0, gt=0, description="Maximum weight of tokens with A > 0.")
    wrong_floor: float = Field(0.0, ge=0, description="Minimum weight of the other tokens.")
    wrong_cap: float = Field(101.0, gt=0, description="Maximum weight of the other tokens.")


class Dispo(WeightedGradient[DispoSettings]):
    """REINFORCE with importance weights bounded separately for right and wrong answers (DISPO)."""

    evidence: ClassVar[str] = "abstract"
    bounds: ClassVar[tuple[str, ...]] = ("right_floor", "right_cap")

    def weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] rho clipped to the bounds for the sign of A."""
        s, ratio = self.settings, log_ratio.exp()
        right = ratio.clamp(s.right_floor, s.right_cap)
        return right.where(advantage > 0, ratio.clamp(s.wrong_floor, s.wrong_cap))


class Topr(WeightedGradient, defaults={"ratio": "response"}):
    """REINFORCE in which wrong answers count less as they become unlikely (TOPR)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ("ratio",)

    def weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] 1 where A > 0, else min(rho, 1)."""
        taper = log_ratio.clamp(max=0.0).exp()
        return taper.new_ones(()).expand_as(taper).where(advantage > 0, taper)


class Minpro(WeightedGradient[ClippedSettings]):
    """REINFORCE weighted by the token's ratio times the smallest earlier one (MinPRO).

    The bounds apply to this product.
    """

    evidence: ClassVar[str] = "text"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    unread: ClassVar[tuple[str, ...]] = ("dual_clip",)

    def weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] rho_t times the minimum of the row's earlier ratios, clipped."""
        return self.settings.bounded((log_ratio + least_before(log_ratio, batch)).exp())
