"""GRPO: group-relative advantages and a clipped token ratio, with the same weight for every response.

    A_i = (r_i - mean r) / (std r + epsilon);   see `student.rl.losses.policy_gradient` for the loss

This is the paper's form. For its KL penalty add term reference_kl with form k3_loss and the wanted weight. Known
variants are settings: Dr. GRPO (advantage.scale none, aggregation constant), DAPO (aggregation token_mean, clip_high
0.28, skip_degenerate, skip_truncated), GSPO (ratio sequence). Source: arXiv 2402.03300.
"""

from __future__ import annotations

from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient


class Grpo(PolicyGradient[ClippedSettings], defaults={"aggregation": "sequence_mean"}):
    """Group-relative policy optimisation on a verifier's reward."""
