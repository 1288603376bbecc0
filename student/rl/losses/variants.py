"""Known variants of the policy gradient, under the names of their papers: `policy_gradient` with other defaults.

    gspo       ratio sequence, clip_low 3e-4, clip_high 4e-4, aggregation sequence_mean        arXiv 2507.18071
    dapo       clip_low 0.2, clip_high 0.28, token_mean, equal groups and cut answers left out     arXiv 2503.14476
    ppo        advantage gae with method critic, clip 0.2, token_mean                          arXiv 1707.06347
    dr_grpo    no deviation, aggregation constant, clip 0.2                                    arXiv 2503.20783

DAPO's dynamic sampling is a rollout strategy and its overlong penalty a reward. GSPO's narrow clip acts only with
several updates per batch: its authors make four.
"""

from __future__ import annotations

from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient


class Gspo(
    PolicyGradient[ClippedSettings],
    defaults={"aggregation": "sequence_mean", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
):
    """GRPO with one importance ratio per response and a narrow clip (GSPO)."""


class Dapo(
    PolicyGradient[ClippedSettings], defaults={"clip_high": 0.28, "skip_degenerate": True, "skip_truncated": True}
):
    """GRPO with a higher upper clip, averaged over tokens, without equal groups and cut answers (DAPO)."""


class Ppo(PolicyGradient[ClippedSettings], defaults={"advantage": {"name": "gae"}}):
    """PPO, with the values of method critic."""


class DrGrpo(
    PolicyGradient[ClippedSettings],
    defaults={"aggregation": "constant", "advantage": {"name": "group_mean", "scale": "none"}},
):
    """GRPO without the biases from dividing by deviation and length (Dr. GRPO)."""
