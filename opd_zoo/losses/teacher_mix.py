"""A teacher's log-ratio and a reward in one policy gradient: MiMo's multi-teacher mix and GLM-5's distillation.

    a_t       log T(y_t) - log S(y_t), without gradient: the sampled reverse KL's reward by token
    mimo_mix  loss_t = -w_t (a_t + alpha A) log S(y_t),   w_t = rho_t where low <= rho_t <= high, else 0
    glm_mix   w_t times the clipped loss on a_t alone,    group of one, no rewards
              w_t = S_old / mu where that is from 1 / importance_band to importance_band, else 0

A is the credit of the outcome, from the advantage chain; rho_t = S / mu with mu the policy that sampled, without
gradient in mimo_mix. T is the teacher that routing assigns to a row: in mimo_mix the expert of its domain, in glm_mix
the checkpoint of an earlier stage, for example. The ratio of glm_mix is to the student when the rows were scored.
Rows whose reward is unknown learn from the teacher alone.
Sources: MiMo-V2-Flash, arXiv 2601.02780, eq. 5 to 9 (text; alpha and the bounds are not stated, those here are ours);
GLM-5, 2602.15763, section 3.5 (text).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed, merge
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput
from student.plugin.traits import Traits
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.row import Row
    from student.settings.recipe import Recipe


class MimoMixSettings(PolicyGradientSettings):
    """Settings of MiMo's mix."""

    aggregation: str = "sequence_mean"
    alpha: float = Field(0.5, ge=0, description="Weight of the outcome's credit; 0 is distillation alone.")
    low: float = Field(0.5, ge=0, description="Minimum ratio of a token that is learnt from.")
    high: float = Field(2.0, gt=0, description="Maximum ratio of a token that is learnt from.")

    @model_validator(mode="after")
    def _holds_one(self) -> MimoMixSettings:
        if not self.low <= 1.0 <= self.high:
            raise ValueError(f"the bounds {self.low:g} to {self.high:g} on the ratio leave out 1; widen them")
        return self


class MimoMix(PolicyGradient[MimoMixSettings]):
    """A teacher's log-ratio per token plus the credit of the outcome (MiMo)."""

    evidence: ClassVar[str] = "text"
    bounds: ClassVar[tuple[str, ...]] = ("low", "high")
    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

    def needs(self) -> Needs:
        """Also the teacher's log-probs of the response tokens."""
        return merge([super().needs(), Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))])

    def selects(self, row: Row) -> bool:
        """Every admitted row, also without a reward: the teacher judges it."""
        return Term.selects(self, row)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics teacher_gap (mean a_t, nats), outcome_share of |credit|, dropped_share."""
        import torch

        zero, count = torch.zeros_like(live.detach()), batch.mask.sum()
        teacher = have(batch.signal(PayloadKind.SAMPLED).sampled, "teacher's log-probs").to(live.dtype)
        gap = torch.where(batch.mask, teacher - live.detach(), zero)
        ratio = log_ratio.detach().exp()
        kept = (ratio >= self.settings.low) & (ratio <= self.settings.high)
        outcome = self.settings.alpha * torch.where(batch.mask, advantage, zero)
        metrics: dict[str, Any] = {
            "teacher_gap": (gap.sum(), count),
            "outcome_share": (outcome.abs().sum(), outcome.abs().sum() + gap.abs().sum()),
            "dropped_share": ((batch.mask & ~kept).sum(), count),
        }
        return TermOutput(-ratio * kept.to(live.dtype) * (gap + outcome) * live, metrics=metrics)


class GlmMixSettings(ClippedSettings):
    """Settings of GLM-5's distillation between stages."""

    aggregation: str = "sequence_mean"
    clip_high: float | None = Field(0.28, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")
    ratio_to: Literal["behaviour", "old"] = Field(
        "old",
        description="Policy under the ratio: the policy that sampled (behaviour), or the student when the rows "
        "were scored (old).",
    )
    importance_band: float | None = Field(
        2.0,
        gt=1,
        description="Weight tokens with old / behaviour, and leave out those for which it is below 1 / "
        "importance_band or above importance_band. null does not weight.",
    )


class GlmMix(PolicyGradient[GlmMixSettings]):
    """A teacher's log-ratio per token in a clipped loss (GLM-5)."""

    evidence: ClassVar[str] = "text"

    def needs(self) -> Needs:
        """The log-probs of teacher and student on the response tokens; no rewards."""
        wanted = super().needs()
        signals = (*wanted.signals, SignalNeed(TEACHER, PayloadSpec.sampled()))
        return Needs(signals=signals, student=wanted.student)

    @property
    def traits(self) -> Traits:
        """See `Traits`; a group of one answer will do."""
        return replace(super().traits, least_group=1)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse settings that have no effect; the checks of groups do not apply.

        Raises:
            ConfigError: with the setting to change.
        """
        self._check_settings()

    def selects(self, row: Row) -> bool:
        """Every admitted row."""
        return Term.selects(self, row)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share and teacher_gap (mean a_t, nats)."""
        import torch

        teacher = have(batch.signal(PayloadKind.SAMPLED).sampled, "teacher's log-probs").to(live.dtype)
        gap = teacher - live.detach()
        gap = torch.where(batch.mask, gap, torch.zeros_like(gap))
        usual = super().surrogate(log_ratio, gap, live, batch)
        return TermOutput(usual.loss, metrics=usual.metrics | {"teacher_gap": (gap.sum(), batch.mask.sum())})
