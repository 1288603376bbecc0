"""GRPO: group-relative advantages, a clipped token ratio, every response weighing the same.

    A_i = (r_i - mean r) / (std r + epsilon);   see `student.rl.losses.policy_gradient` for the loss

The paper's form. Its KL penalty is term reference_kl with form k3_loss and the wanted weight. Known variants are
settings: Dr. GRPO (advantage.scale none, aggregation constant), DAPO (aggregation token_mean, clip_high 0.28,
skip_degenerate, skip_truncated), GSPO (ratio sequence). Source: arXiv 2402.03300.
"""

from __future__ import annotations

from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient


class GrpoSettings(ClippedSettings):
    """Settings of GRPO: those of the policy gradient with its own defaults."""

    aggregation: str = "sequence_mean"


class Grpo(PolicyGradient):
    """GRPO."""

    settings_type = GrpoSettings
