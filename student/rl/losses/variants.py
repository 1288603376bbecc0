"""Known variants of the policy gradient, under the names of their papers: `policy_gradient` with other defaults.

    gspo       ratio sequence, clip_low 3e-4, clip_high 4e-4, aggregation sequence_mean        arXiv 2507.18071
    dapo       clip_low 0.2, clip_high 0.28, token_mean, equal groups and cut answers left out     arXiv 2503.14476
    ppo        advantage gae with method critic, clip 0.2, token_mean                          arXiv 1707.06347
    dr_grpo    no deviation, aggregation constant, clip 0.2                                    arXiv 2503.20783

DAPO's dynamic sampling is a rollout strategy and its overlong penalty a reward. GSPO's narrow clip acts only with
several updates per batch: its authors make four.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient
from student.rl.losses.ratios import Ratio
from student.rl.losses.settings import advantage_field


class GspoSettings(ClippedSettings):
    """Settings of GSPO."""

    aggregation: str = "sequence_mean"
    ratio: Ratio = Field("sequence", description="Unit over which the importance ratio is taken.")
    clip_low: float | None = Field(3e-4, gt=0, le=1, description="Clips the ratio at 1 - clip_low; null does not clip.")
    clip_high: float | None = Field(4e-4, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")


class Gspo(PolicyGradient[GspoSettings]):
    """GRPO with one importance ratio per response and a narrow clip (GSPO)."""


class DapoSettings(ClippedSettings):
    """Settings of DAPO."""

    clip_high: float | None = Field(0.28, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")
    skip_degenerate: bool = Field(
        True, description="Leave groups whose rewards are all equal out of the means as well."
    )
    skip_truncated: bool = Field(True, description="Leave out responses that hit the length limit.")


class Dapo(PolicyGradient[DapoSettings]):
    """GRPO with a higher upper clip, averaged over tokens, without equal groups and cut answers (DAPO)."""


class PpoSettings(ClippedSettings):
    """Settings of PPO with a critic."""

    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="gae")


class Ppo(PolicyGradient[PpoSettings]):
    """PPO, with the values of method critic."""


class DrGrpoSettings(ClippedSettings):
    """Settings of Dr. GRPO."""

    aggregation: str = "constant"
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="group_mean", scale="none")


class DrGrpo(PolicyGradient[DrGrpoSettings]):
    """GRPO without the biases from dividing by deviation and length (Dr. GRPO)."""
