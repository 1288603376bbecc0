"""Reinforcement learning on the same loop: advantage estimators and the terms that use them, by name."""

from opd.registry import Registry
from student.learning.terms import OBJECTIVES

__all__ = ["ADVANTAGES", "OBJECTIVES"]

ADVANTAGES = Registry("advantage", "opd.advantages", member="settings_type")

for name, path, summary in [
    ("group_mean", "advantages.group_mean:GroupMean", "reward minus the group's mean, by default over its deviation"),
    ("leave_one_out", "advantages.leave_one_out:LeaveOneOut", "reward minus the mean of the rest of the group"),
]:
    ADVANTAGES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    (
        "policy_gradient",
        "losses.policy_gradient:PolicyGradient",
        "a policy gradient with any advantage, ratio and clip",
    ),
    ("grpo", "losses.grpo:Grpo", "group-relative policy optimisation on a verifier's reward"),
    ("entropy_bonus", "losses.entropy_bonus:EntropyBonus", "a bonus on the student's exact entropy"),
    ("rloo", "losses.rloo:Rloo", "REINFORCE with a leave-one-out baseline on a verifier's reward"),
]:
    OBJECTIVES.add(name, f"student.rl.{path}", summary)
