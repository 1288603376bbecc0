"""Policy losses that clamp, mix or mask importance ratios: StableReinforce, DHPO, MiniRL and the REC family.

    stable_reinforce   the clipped loss on rho = exp(clamp(log rho, -log 1000, log 1000))
    dhpo               loss = -(w clip(rho_t) + (1 - w) clip(s)) A,   s = (rho_1 ... rho_T)^(1/T)
                       with `mix_by` w = H_t / log V (entropy) or 1 - H_t / log V (certainty) in place of a constant
    minirl             loss = -sg(min(pi / mu, cap)) keep A log pi,   keep by the one-sided rule on pi / pi_old
                       with `beyond: drop` tokens with pi / mu above cap or below 1 / cap are left out instead
    rec                loss = -keep v A log pi + R,   keep by `rule` on rho, v by `weigh`, R by `regulariser`

    one_sided   A >= 0: rho <= 1 + clip_high;   A <= 0: rho >= 1 - clip_low
    two_sided   both bounds for every token
    ring        two_sided, or far out: A >= 0 and rho <= 1 - far_low, A <= 0 and rho >= 1 + far_high

    weigh         importance v = sg(rho);   sequence v = sg((rho_1 ... rho_T)^(1/T));   credit v = exp(A / temperature)
    regulariser   k2          R = strength (log rho)^2;    forward_kl  R = -strength log pi

On policy all of them reduce to REINFORCE. Metric dropped_share is the share of tokens that are not kept. Sources:
R1-Reward, arXiv 2505.02835 (released code); DHPO, 2601.05607 (notes; that w goes by the entropy is stated, its map is
ours); MiniRL, 2512.01374; REC, 2509.24203 (code of Trinity-RFT), whose balance of right and wrong answers is advantage
rec_balance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.errors import ConfigError
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings
from student.rl.losses.ratios import at_grain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_LOW, _HIGH = "Limits the ratio to at least 1 - clip_low.", "Limits the ratio to at most 1 + clip_high."
_FARTHEST = math.log(1000.0)


class StableReinforce(PolicyGradient[ClippedSettings]):
    """The clipped loss with log-ratios clamped against overflow (StableReinforce).

    Its filter is advantage outliers.
    """

    evidence: ClassVar[str] = "text and code"

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; also metric clamped_share."""
        output = super().surrogate(log_ratio.clamp(-_FARTHEST, _FARTHEST), advantage, live, batch)
        far = batch.mask & (log_ratio.detach().abs() > _FARTHEST)
        return TermOutput(output.loss, metrics=output.metrics | {"clamped_share": (far.sum(), batch.mask.sum())})


class DhpoSettings(PolicyGradientSettings):
    """Settings of DHPO."""

    mix: float = Field(
        0.5, ge=0, le=1, description="w, the weight of the ratio by token; 1 - w is that of the ratio by sequence."
    )
    mix_by: Literal["constant", "entropy", "certainty"] = Field(
        "constant",
        description="What w is: constant, `mix`; entropy, the student's entropy at the token over log V; "
        "certainty, 1 minus that.",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="Limits the ratio of a token to at least 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Limits the ratio of a token to at most 1 + clip_high.")
    sequence_low: float = Field(0.2, gt=0, le=1, description="Limits the ratio of a sequence to at least 1 minus this.")
    sequence_high: float = Field(0.2, gt=0, description="Limits the ratio of a sequence to at most 1 plus this.")


class Dhpo(PolicyGradient[DhpoSettings]):
    """A mixture of the clipped ratios by token and by response (DHPO)."""

    evidence: ClassVar[str] = "inferred"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "sequence_low", "sequence_high")
    of_ratio: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ("dual_clip",)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share (tokens with either part clipped) and mix (mean of w)."""
        s = self.settings
        token, sequence = log_ratio.exp(), at_grain(log_ratio, batch, "sequence").exp()
        # Clipped without PPO's minimum: outside its bounds a part has no gradient, whatever the sign of the advantage.
        near = token.clamp(1.0 - s.clip_low, 1.0 + s.clip_high)
        whole = sequence.clamp(1.0 - s.sequence_low, 1.0 + s.sequence_high)
        bites = batch.mask & ((near != token) | (whole != sequence))
        mix, count = self._mix(live, batch), batch.mask.sum()
        loss = -(mix * near + (1.0 - mix) * whole) * advantage
        shown = mix.where(batch.mask, mix.new_zeros(())).sum()
        return TermOutput(loss, metrics={"clipped_share": (bites.sum(), count), "mix": (shown, count)})

    def _mix(self, live: Tensor, batch: TokenBatch) -> Tensor:
        """[N] w, without gradient.

        log V, unlike a maximum over the batch, does not depend on how rows are split into micro-batches.
        """
        s = self.settings
        if s.mix_by == "constant":
            return live.detach().new_full(live.shape, s.mix)
        entropy = have(batch.student.scores, "scores").entropy.detach().to(live.dtype)
        share = (entropy / math.log(max(2, batch.valid_vocab))).clamp(0.0, 1.0)
        return share if s.mix_by == "entropy" else 1.0 - share


class RecSettings(PolicyGradientSettings):
    """Settings of the REC family."""

    rule: Literal["one_sided", "two_sided", "ring"] = Field(
        "one_sided",
        description="Which tokens are kept: those within the bound on the side of their advantage, within both "
        "bounds, or also those far outside (ring).",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float = Field(0.2, gt=0, description=_HIGH)
    far_low: float = Field(
        0.6,
        gt=0,
        le=1,
        description="With rule ring: tokens with A >= 0 and a ratio of at most 1 - far_low are kept too.",
    )
    far_high: float = Field(
        2.0, gt=0, description="With rule ring: tokens with A <= 0 and a ratio of at least 1 + far_high are kept too."
    )
    weigh: Literal["none", "importance", "sequence", "credit"] = Field(
        "none",
        description="Weight of kept tokens: none, the ratio by token (importance), the ratio by response "
        "(sequence), or exp(A / temperature) (credit).",
    )
    temperature: float = Field(
        1.0, gt=0, description="With weigh credit: temperature of the weight exp(A / temperature)."
    )
    regulariser: Literal["none", "k2", "forward_kl"] = Field(
        "none",
        description="Regulariser that is added: k2 holds log rho near 0; forward_kl raises the probability of "
        "what was sampled.",
    )
    strength: float = Field(0.0, ge=0, description="Weight of the regulariser.")


class Rec(PolicyGradient[RecSettings]):
    """REINFORCE that drops tokens whose ratio is too far from 1 (REC)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    unread: ClassVar[tuple[str, ...]] = ("dual_clip",)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position.

        Metrics dropped_share, and if set weight (mean over kept tokens) and regulariser (mean over tokens).
        """
        s, count = self.settings, batch.mask.sum()
        keep = self._kept(log_ratio.detach().exp(), advantage)
        weight, zero = self._weight(log_ratio, advantage, batch), live.detach().new_zeros(())
        loss = -keep.to(live.dtype) * weight * advantage * live
        kept = batch.mask & keep
        metrics: dict[str, Any] = {"dropped_share": ((batch.mask & ~keep).sum(), count)}
        if s.weigh != "none":
            metrics["weight"] = (weight.where(kept, zero).sum(), kept.sum())
        if s.regulariser != "none":
            added = s.strength * (log_ratio**2 if s.regulariser == "k2" else -live)
            metrics["regulariser"] = (added.detach().where(batch.mask, zero).sum(), count)
            loss = loss + added
        return TermOutput(loss, metrics=metrics)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a regulariser without a strength or the reverse, and parts made of the ratio with ratio none.

        Raises:
            ConfigError: with the settings to change.
        """
        super().check(recipe, terms)
        if (self.settings.regulariser == "none") != (self.settings.strength == 0.0):
            raise ConfigError(
                f"objective 'rec' has regulariser {self.settings.regulariser} with strength "
                f"{self.settings.strength:g}, which has no effect; set both, or neither."
            )
        if self.settings.ratio != "none":
            return
        for name, value in (("regulariser", self.settings.regulariser), ("weigh", self.settings.weigh)):
            if value in ("k2", "importance", "sequence"):
                raise ConfigError(
                    f"objective 'rec' has {name} {value}, which uses the ratio and has no effect with ratio none; set "
                    f"ratio: token, or remove {name}."
                )

    def _weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] v, without gradient."""
        known, weigh = log_ratio.detach(), self.settings.weigh
        if weigh == "sequence":
            return at_grain(known, batch, "sequence").exp()
        if weigh == "credit":
            return (advantage / self.settings.temperature).exp()
        return known.exp() if weigh == "importance" else known.new_ones(known.shape)

    def _kept(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        s = self.settings
        under, over = ratio <= 1.0 + s.clip_high, ratio >= 1.0 - s.clip_low
        if s.rule == "one_sided":
            return under.where(advantage >= 0, over)
        back = (ratio <= 1.0 - s.far_low).where(advantage >= 0, ratio >= 1.0 + s.far_high)
        return (under & over) | back if s.rule == "ring" else under & over


class MinirlSettings(PolicyGradientSettings):
    """Settings of MiniRL."""

    ratio_to: Literal["behaviour", "old"] = Field(
        "old",
        description="Policy under the ratio that decides which tokens are kept: the policy that sampled (behaviour), "
        "or the student when the rows were scored (old).",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float = Field(0.2, gt=0, description=_HIGH)
    cap: float = Field(
        2.0, gt=0, description="Maximum weight of a token for the mismatch with the policy that sampled."
    )
    beyond: Literal["cap", "drop"] = Field(
        "cap",
        description="What happens to weights above cap: cap limits them; drop leaves out these tokens, and those "
        "with weights below 1 / cap.",
    )


class Minirl(PolicyGradient[MinirlSettings]):
    """REINFORCE corrected for staleness and for the engine's numerics (MiniRL)."""

    evidence: ClassVar[str] = "text"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    unread: ClassVar[tuple[str, ...]] = ("dual_clip",)

    @property
    def traits(self) -> Traits:
        # Its own weight divides by the policy that sampled.
        return replace(super().traits, learns_from_stale_rows=True, reads=("behaviour",))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a second weight for the same mismatch, and a cap that would drop every token.

        Raises:
            ConfigError: naming the setting to change.
        """
        super().check(recipe, terms)
        for name in ("importance_cap", "importance_band"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(
                    "objective 'minirl' already weights tokens by their ratio to the policy that sampled, up to cap "
                    f"{self.settings.cap:g}, and {name} would do so again; remove {name}."
                )
        if self.settings.beyond == "drop" and self.settings.cap <= 1.0:
            raise ConfigError(
                f"objective 'minirl' with beyond: drop and cap {self.settings.cap:g} leaves out every token; raise "
                "cap above 1."
            )

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics dropped_share and capped_share (tokens with pi / mu above cap)."""
        s, ratio, count = self.settings, log_ratio.detach().exp(), batch.mask.sum()
        keep = (ratio <= 1.0 + s.clip_high).where(advantage > 0, (advantage == 0) | (ratio >= 1.0 - s.clip_low))
        gap = (live.detach() - batch.behaviour_logp.to(live.dtype)).where(batch.mask, live.new_zeros(()))
        weight = gap.exp().clamp(max=s.cap)
        if s.beyond == "drop":
            keep = keep & (gap.abs() <= math.log(s.cap))
        dropped, capped = batch.mask & ~keep, batch.mask & (gap.exp() > s.cap)
        return TermOutput(
            -weight * keep.to(live.dtype) * advantage * live,
            metrics={"dropped_share": (dropped.sum(), count), "capped_share": (capped.sum(), count)},
        )
