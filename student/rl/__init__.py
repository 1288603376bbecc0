"""Reinforcement learning on the same loop: rewards, advantage estimators and the terms that use them, by name."""

from opd.registry import Registry
from student.learning.terms import OBJECTIVES

__all__ = ["ADVANTAGES", "OBJECTIVES", "REWARDS"]

ADVANTAGES = Registry("advantage", "opd.advantages", member="settings_type")
REWARDS = Registry("reward", "opd.rewards", member="settings_type")

for name, path, summary in [
    ("group_mean", "advantages.group_mean:GroupMean", "reward minus the group's mean, by default over its deviation"),
    ("reinforce", "advantages.reinforce:Reinforce", "reward minus a constant"),
    ("lite_ppo", "advantages.batch_scale:LitePpo", "reward minus the group's mean, over the batch's deviation"),
    ("reinforce_pp", "advantages.batch_scale:ReinforcePp", "reward normalised over the whole batch (REINFORCE++)"),
    ("ngrpo", "advantages.ngrpo:Ngrpo", "GRPO with virtual rows of the best reward: all-wrong groups are learnt from"),
    ("signed", "advantages.signed:Signed", "right and wrong answers by fixed weights: PSR, NSR, W-REINFORCE"),
    ("opmd", "advantages.shifted:Opmd", "reward minus the group's mean or soft maximum, for mirror descent"),
    ("asym_re", "advantages.shifted:AsymRe", "reward minus a shifted group mean (AsymRE)"),
    ("mc_grpo", "advantages.mc_grpo:McGrpo", "reward against the group's median and absolute deviation"),
    ("bnpo", "advantages.bnpo:Bnpo", "centred reward over a beta density fitted to the batch"),
    ("lpo", "advantages.lpo:Lpo", "a listwise target's weight minus the policy's, for each response"),
    ("pacs", "advantages.lpo:Pacs", "the slope of a cross-entropy on right and wrong, over the group"),
    ("ace", "advantages.modifiers:Ace", "modifier: confident errors weigh more"),
    ("sngs", "advantages.modifiers:Sngs", "modifier: errors weigh less where a group rarely succeeds"),
    ("outliers", "advantages.modifiers:Outliers", "modifier: standardise over the batch, drop what is beyond 3 sigma"),
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
    ("gspo", "losses.variants:Gspo", "GRPO with one ratio per response and a narrow clip"),
    ("dapo", "losses.variants:Dapo", "GRPO with a higher upper clip, by token, without equal groups and cut answers"),
    ("dr_grpo", "losses.variants:DrGrpo", "GRPO without the biases of deviation and length"),
    ("cispo", "losses.weighted:Cispo", "REINFORCE with a capped importance weight"),
    ("dispo", "losses.weighted:Dispo", "REINFORCE with importance weights bounded apart for right and wrong answers"),
    ("topr", "losses.weighted:Topr", "REINFORCE whose wrong answers taper off as they become rare"),
    ("minpro", "losses.weighted:Minpro", "REINFORCE weighted by the ratio and the least one before it"),
    ("stable_reinforce", "losses.guarded:StableReinforce", "the clipped loss on log-ratios that cannot overflow"),
    ("dhpo", "losses.guarded:Dhpo", "a mix of the clipped ratios by token and by response"),
    ("rec", "losses.guarded:Rec", "REINFORCE without tokens whose ratio has gone too far"),
    ("minirl", "losses.guarded:Minirl", "REINFORCE corrected for staleness and for the engine's numerics"),
    ("rloo", "losses.rloo:Rloo", "REINFORCE with a leave-one-out baseline on a verifier's reward"),
]:
    OBJECTIVES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    ("overlong", "overlong:Overlong", "a penalty that grows over the last tokens before the length limit (DAPO)"),
    ("hapo", "hapo:Hapo", "a bonus for correct answers shorter than the prompt's shortest so far"),
    ("dler", "dler:Dler", "correctness, and nothing for an answer that the length limit cut"),
    ("rl_struct", "rl_struct:RlStruct", "tiers of structure, format, validity and correctness of a JSON answer"),
    ("noisy_verifier", "noisy_verifier:NoisyVerifier", "the verdict corrected for a verifier's known error rates"),
    ("ttrv", "ttrv:Ttrv", "how many samples agree with an answer, without labels"),
    ("rlpr", "rlpr:Rlpr", "the student's own probability of the reference answer after its reasoning"),
    ("function", "function:FunctionReward", "a plain function of prompt and answer, by dotted path"),
]:
    REWARDS.add(name, f"student.rl.rewards.{path}", summary)
