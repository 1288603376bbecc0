"""A-LoL: learns from answers that beat their prompt's value, weighted by a ratio to a frozen reference.

    A    = R - V(x), answers with A <= 0 left out                    advantage prompt_value, keep positive
    loss = -A sum_t sg(clip(w, 1 - clip_low, 1 + clip_high)) log pi(y_t),   w = pi(y) / pi_ref(y) of the response

Answers may have any origin, and need not come from a policy of the run (`rows: expert`, method expert_rows). The
paper's variants are settings: `ratio: token` is A-LoL seq., `ratio: none` is A-LoL ref. free, and the KL form is ratio
none with term reference_kl. V is method critic's value of the prompt. The authors fit a head with attention on the
frozen reference before training; `features: initial` and `fits_until` stand in for that. They also draw answers in
proportion to A, which is not offered. Sources: arXiv 2305.14718 and the released code, abaheti95/LoL-RL, where w is
clipped to 0.1 to 1.9 and sums over tokens are averaged over answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from opd_zoo.losses.weighted import WeightedGradient
from student.data.needs import REFERENCE, Needs, SignalNeed, merge
from student.data.token_batch import have
from student.plugin.traits import Traits
from student.rl.losses.ratios import Ratio
from student.rl.losses.settings import PolicyGradientSettings, advantage_field

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class ALolSettings(PolicyGradientSettings):
    """Settings of A-LoL."""

    rows: Literal["all", "sampled", "expert"] = "all"
    aggregation: str = "constant"
    ratio: Ratio = Field("response", description="Unit over which the ratio to the reference is taken.")
    clip_low: float | None = Field(
        0.9, gt=0, le=1, description="Limits the weight to at least 1 - clip_low; null sets no limit."
    )
    clip_high: float | None = Field(
        0.9, gt=0, description="Limits the weight to at most 1 + clip_high; null sets no limit."
    )
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="prompt_value", keep="positive")


class ALol(WeightedGradient[ALolSettings]):
    """Learns answers better than their prompt's value, weighted by a ratio to a reference (A-LoL)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    # The importance weight is denominator / behaviour, and the denominator of this loss is the reference.
    unread: ClassVar[tuple[str, ...]] = ("dual_clip", "importance_cap", "importance_band")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, reads=())  # its ratio is to the reference

    def needs(self) -> Needs:
        """What every policy loss needs, and the reference's log-probs of the response tokens."""
        return merge([super().needs(), Needs(signals=(SignalNeed(REFERENCE, PayloadSpec.sampled()),))])

    def denominator(self, batch: TokenBatch) -> Tensor:
        """[N] log-probs of the response tokens under the reference."""
        return have(batch.signal(PayloadKind.SAMPLED, REFERENCE).sampled, "reference's log-probs")

    def weight(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """[N] the clipped ratio of student to reference, without gradient."""
        return self.settings.bounded(log_ratio.exp())
