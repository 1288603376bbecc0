"""GRPO: group-relative advantages, a clipped token ratio, every response weighing the same.

    A_i = (r_i - mean r) / (std r + epsilon);   see `student.rl.losses.policy_gradient` for the loss

The paper's form. Its KL penalty is term reference_kl with form k3_loss and the wanted weight. Known variants are
settings: Dr. GRPO (advantage.scale none, aggregation constant), DAPO (aggregation token_mean, clip_high 0.28,
skip_degenerate, skip_truncated), GSPO (ratio sequence). Source: arXiv 2402.03300.
"""

from __future__ import annotations

from pydantic import Field

from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings


class GrpoSettings(PolicyGradientSettings):
    """Settings of GRPO: those of the policy gradient with its own defaults."""

    aggregation: str = "sequence_mean"
    clip_low: float | None = Field(0.2, gt=0, le=1, description="The ratio is clipped at 1 - clip_low; null: not.")
    clip_high: float | None = Field(0.2, gt=0, description="The ratio is clipped at 1 + clip_high; null: not.")


class Grpo(PolicyGradient):
    """GRPO."""

    settings_type = GrpoSettings
