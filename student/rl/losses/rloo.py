"""RLOO: REINFORCE with the mean reward of the other samples as baseline; unbiased, without a critic or a clip.

    A_i = r_i - mean_{j != i} r_j,      loss = -A_i sum_t log pi(y_t)

The log-probs of a response are summed, hence aggregation constant. Source: arXiv 2402.14740.
"""

from __future__ import annotations

from student.rl.losses.policy_gradient import PolicyGradient


class Rloo(
    PolicyGradient, defaults={"aggregation": "constant", "ratio": "none", "advantage": {"name": "leave_one_out"}}
):
    """REINFORCE with a leave-one-out baseline on a verifier's reward."""
