"""HiPER's credit: tokens of subgoals, actions and switches each by an advantage of their own, by method hiper_critic.

    A(t) = A_high on subgoals where a segment begins, A_low on actions, A_term on switches, 0 on other tokens

The formulas are the method's. Its authors train with PPO's clipped ratio and a penalty on the divergence from the
reference. Source: arXiv 2602.16165 (abstract); JonP07/HiPER-agent.
"""

from student.rl.advantages.archer import OfTurnCritic


class Hiper(OfTurnCritic):
    """The estimator; see the module for the formula."""

    evidence = "abstract"
    critic = "HiperCritic"
    method = "hiper_critic"
