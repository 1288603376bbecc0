"""Reinforcement learning on the same loop: the registries of rewards and advantage estimators."""

from opd.registry import Registry

__all__ = ["ADVANTAGES", "REWARDS"]

ADVANTAGES = Registry(
    "advantage",
    "opd.advantages",
    member="settings_type",
    names={
        "group_mean": "student.rl.advantages.group_mean:GroupMean",
        "reinforce": "student.rl.advantages.reinforce:Reinforce",
        "gae": "student.rl.advantages.gae:Gae",
        "leave_one_out": "student.rl.advantages.leave_one_out:LeaveOneOut",
    },
)
REWARDS = Registry(
    "reward",
    "opd.rewards",
    member="settings_type",
    names={
        "overlong": "student.rl.rewards.overlong:Overlong",
        "judge": "student.rl.rewards.judge:Judge",
        "http_judge": "student.rl.rewards.judge:HttpJudge",
        "grpc_judge": "student.rl.rewards.judge:GrpcJudge",
        "function": "student.rl.rewards.function:FunctionReward",
    },
)
