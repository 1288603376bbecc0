"""RLOO: REINFORCE with the mean of the other samples as the baseline, unbiased, no critic and no clip.

    A_i = r_i - mean_{j != i} r_j,      loss = -A_i sum_t log pi(y_t)

Tokens of a response are summed, so aggregation is constant. Source: arXiv 2402.14740.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings


class RlooSettings(PolicyGradientSettings):
    """Settings of RLOO: those of the policy gradient with its own defaults."""

    aggregation: str = "constant"
    ratio: Literal["token", "sequence", "none"] = Field("none", description="The importance ratio.")
    advantage: dict[str, Any] = Field(
        default_factory=lambda: {"name": "leave_one_out"},
        description="The advantage estimator: its name and settings; see `opd plugins list`.",
    )


class Rloo(PolicyGradient):
    """RLOO."""

    settings_type = RlooSettings
