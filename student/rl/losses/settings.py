"""Settings that policy losses share; a loss with other defaults subclasses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import TypeVar

from student.plugin.terms import TermSettings
from student.rl.losses.ratios import Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row


def advantage_field(**entry: Any) -> Any:
    """The setting `advantage` with `entry` as its default."""
    return Field(
        default_factory=lambda: dict(entry),
        description="Advantage estimator with its name and settings, or a list of an estimator and modifiers of its "
        "credit; see `opd plugins list advantage`.",
    )


CREDIT_SIGNS = {1: "good", 0: "even", -1: "bad"}
"""The strata by the sign of the credit."""


class PolicyGradientSettings(TermSettings):
    """Settings of the policy gradient."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    strata: str = "credit"
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="group_mean")
    ratio: Ratio = Field("token", description="Unit over which the importance ratio is taken.")
    ratio_to: Literal["behaviour", "old"] = Field(
        "behaviour",
        description="Policy under the ratio: the policy that sampled (behaviour), or the student when the rows were "
        "scored (old).",
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="With ratio_to old: weight each token with min(old / behaviour, cap), detached, to correct for an "
        "engine with other numerics (truncated importance sampling). null does not weight.",
    )
    importance_band: float | None = Field(
        None,
        gt=1,
        description="With ratio_to old: weight each token with old / behaviour, and leave out tokens for which it is "
        "below 1 / importance_band or above importance_band (masked importance sampling). null does not weight.",
    )
    clip_low: float | None = Field(None, gt=0, le=1, description="Clips the ratio at 1 - clip_low; null does not clip.")
    clip_high: float | None = Field(None, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Limits the ratio to this where the advantage is negative; 3 in public code. null sets no limit.",
    )
    loss: str | None = Field(
        None,
        description="Dotted path of a function (log_ratio, advantage, logp, mask) -> loss per token, package.module:"
        "function, in place of the term's own formula. null uses that.",
    )
    skip_degenerate: bool = Field(
        False, description="Leave groups whose rewards are all equal out of the means as well (DAPO, arXiv 2503.14476)."
    )
    skip_truncated: bool = Field(
        False,
        description="Leave responses that hit the length limit out of the loss, as DAPO does, and out of their "
        "group's statistics, because their verdict is about the limit.",
    )

    def admits(self, row: Row | Outcome) -> bool:
        """As of every term; with `skip_truncated` also not truncated."""
        return super().admits(row) and not (self.skip_truncated and row.truncated)

    def strata_of(self, outcomes: Sequence[Outcome]) -> list[str]:
        """As of every term; with strata `credit` all signs of it."""
        return sorted(CREDIT_SIGNS.values()) if self.strata == "credit" else super().strata_of(outcomes)

    def bounded(self, ratio: Tensor) -> Tensor:
        """`ratio` clipped to [1 - clip_low, 1 + clip_high]; a bound of None does not clip."""
        clipped = ratio if self.clip_low is None else ratio.clamp(min=1.0 - self.clip_low)
        return clipped if self.clip_high is None else clipped.clamp(max=1.0 + self.clip_high)


PolicyGradientSettings_co = TypeVar(
    "PolicyGradientSettings_co", bound=PolicyGradientSettings, covariant=True, default=PolicyGradientSettings
)


class ClippedSettings(PolicyGradientSettings):
    """Settings of the policy gradient with PPO's clip of 0.2 as the default."""

    clip_low: float | None = Field(0.2, gt=0, le=1, description="Clips the ratio at 1 - clip_low; null does not clip.")
    clip_high: float | None = Field(0.2, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")
