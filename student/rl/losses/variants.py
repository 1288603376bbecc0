"""Settings of the policy gradient under the names of their papers.

    gspo       ratio sequence, clip_low 3e-4, clip_high 4e-4, aggregation sequence_mean        arXiv 2507.18071
    dapo       clip_low 0.2, clip_high 0.28, token_mean, equal groups and cut answers left out     arXiv 2503.14476
    dr_grpo    no deviation, aggregation constant, clip 0.2                                    arXiv 2503.20783

The loss is `policy_gradient`'s. DAPO's dynamic sampling is a rollout strategy and its overlong penalty a reward. GSPO's
narrow clip acts only with several updates per batch: its authors make four.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings
from student.rl.losses.ratios import Ratio

_LOW = "The ratio is clipped at 1 - clip_low; null: not."
_HIGH = "The ratio is clipped at 1 + clip_high; null: not."


class GspoSettings(PolicyGradientSettings):
    """Settings of GSPO."""

    aggregation: str = "sequence_mean"
    ratio: Ratio = Field("sequence", description="The grain of the importance ratio.")
    clip_low: float | None = Field(3e-4, gt=0, le=1, description=_LOW)
    clip_high: float | None = Field(4e-4, gt=0, description=_HIGH)


class Gspo(PolicyGradient):
    """GSPO."""

    settings_type = GspoSettings
    evidence: ClassVar[str] = "text and code"


class DapoSettings(PolicyGradientSettings):
    """Settings of DAPO."""

    clip_low: float | None = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float | None = Field(0.28, gt=0, description=_HIGH)
    skip_degenerate: bool = Field(True, description="Leave groups whose rewards all agree out of the means too.")
    skip_truncated: bool = Field(True, description="Leave out responses that hit the length limit.")


class Dapo(PolicyGradient):
    """DAPO's loss."""

    settings_type = DapoSettings
    evidence: ClassVar[str] = "text and code"


class DrGrpoSettings(PolicyGradientSettings):
    """Settings of Dr. GRPO."""

    aggregation: str = "constant"
    clip_low: float | None = Field(0.2, gt=0, le=1, description=_LOW)
    clip_high: float | None = Field(0.2, gt=0, description=_HIGH)
    advantage: dict[str, Any] | list[dict[str, Any]] = Field(
        default_factory=lambda: {"name": "group_mean", "scale": "none"},
        description="The advantage estimator, or a list of an estimator and modifiers of its credit.",
    )


class DrGrpo(PolicyGradient):
    """Dr. GRPO."""

    settings_type = DrGrpoSettings
    evidence: ClassVar[str] = "text and code"
