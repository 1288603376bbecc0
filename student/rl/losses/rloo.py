"""RLOO: REINFORCE with the mean reward of the other samples as baseline; unbiased, without a critic or a clip.

    A_i = r_i - mean_{j != i} r_j,      loss = -A_i sum_t log pi(y_t)

The log-probs of a response are summed, hence aggregation constant. Source: arXiv 2402.14740.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings
from student.rl.losses.ratios import Ratio


class RlooSettings(PolicyGradientSettings):
    """Settings of the policy gradient with RLOO's defaults."""

    aggregation: str = "constant"
    ratio: Ratio = Field("none", description="Unit over which the importance ratio is taken.")
    advantage: dict[str, Any] | list[dict[str, Any]] = Field(
        default_factory=lambda: {"name": "leave_one_out"},
        description="Advantage estimator, or a list of an estimator and modifiers of its credit.",
    )


class Rloo(PolicyGradient[RlooSettings]):
    """REINFORCE with a leave-one-out baseline on a verifier's reward."""
