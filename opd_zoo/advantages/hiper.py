"""HiPER's credit: subgoals, actions and switches each have an advantage of their own, from method hiper_critic.

    A(t) = A_high on subgoals where a segment begins, A_low on actions, A_term on switches, 0 on other tokens

`opd_zoo.critics.hiper` has the formulas. The authors train with PPO's clipped ratio and a KL penalty to the reference.
Source: arXiv 2602.16165 (abstract); JonP07/HiPER-agent.
"""

from opd_zoo.advantages.archer import OfTurnCritic


class Hiper(OfTurnCritic):
    """Separate advantages for subgoals, actions and switches (HiPER)."""

    evidence = "abstract"
    critic = "HiperCritic"
    source = "hiper_values"
