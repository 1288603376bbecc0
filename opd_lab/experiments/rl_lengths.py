"""(r5) Length rewards: shorter answers at the same accuracy?"""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.reinforcement import (
    OFF_POLICY,
    QUICK_ONE,
    RATES_OFF,
    RATES_ON,
    STEPS,
    WORLD,
    reinforce,
)

_LENGTH, _MIDDLE = 28, 14
"""Maximum tokens of an answer, and the number that an answer in the medium way takes."""


def _reward(key: str, title: str, metric: str, **reward: Any) -> Arm:
    return Arm(key, title, {"rewards": [reward]}, RATES_ON, fires=(Fires(metric, ">", 0.0),))


_COSINE = {"name": "cosine_length", "longest": _LENGTH, "right": [1.0, 0.5], "wrong": [0.0, 0.0], "over": -0.5}
_ARMS = (
    Arm("grpo", "GRPO, no length reward", {}, RATES_ON),
    _reward(
        "overlong",
        f"soft overlong penalty from {_MIDDLE} tokens on (DAPO)",
        "overlong/bites",
        name="overlong",
        buffer=_LENGTH - _MIDDLE,
        penalty=0.5,
    ),
    _reward("cosine", "right answers from 1 to 0.5 by their length (cosine)", "cosine_length/length", **_COSINE),
    _reward("dler", f"nothing over {_MIDDLE} tokens (DLER)", "dler/cut_share", name="dler", limit=_MIDDLE),
    Arm(
        "drpo",
        "DRPO: right answers weigh by their length, wrong ones do not",
        {"objective": [{"name": "policy_gradient", "ratio": "none", "aggregation": "constant"}]}
        | {"objective.0.advantage": {"name": "drpo"}},
        RATES_ON,
        fires=(Fires("advantage_magnitude", ">", 0.0),),
    ),
    Arm(
        "rorecomp",
        "RoRecomp: short right and long wrong answers first",
        {
            "objective": [{"name": "grpo", "rows": "all"}],
            "rollout.strategy": {"name": "rorecomp", "wait": 8, "compensate": 1.0},
        },
        RATES_ON,
        fires=(Fires("rorecomp/first_share", "<", 1.0), Fires("replayed_share", ">", 0.0)),
    ),
    Arm(
        "cosine_off",
        "the cosine off policy, clip 0.2",
        {"objective": [{"name": "grpo"}], "rewards": [_COSINE], **OFF_POLICY},
        RATES_OFF,
        fires=(Fires("clipped_share", ">", 0.0),),
    ),
)

_SHORT = ("overlong", "cosine", "dler", "drpo", "rorecomp")
_CLAIMS = (
    *(
        Claim(f"Answers are shorter than GRPO's: {key}", key, "grpo", "metric/response_length", "less")
        for key in _SHORT
    ),
    *(Claim(f"95 % of GRPO's accuracy is kept: {key}", key, "grpo", "accuracy", "more", share=0.95) for key in _SHORT),
    Claim(
        "Off policy the cosine's answers are shorter still", "cosine_off", "cosine", "metric/response_length", "less"
    ),
)

EXPERIMENT = Experiment(
    name="rl_lengths",
    letter="r5",
    title="Length rewards",
    question=(
        "The base answers a prompt in three ways, of about 24, 14 and 3 tokens, the shorter the harder. Which rewards "
        "move it to shorter ones, and what do they cost in accuracy?"
    ),
    tasks=("long",),
    world=WORLD,
    recipe=reinforce(length=_LENGTH),
    served=("long",),
    evaluated=("base", "long"),
    arms=_ARMS,
    claims=_CLAIMS,
    premises=(
        Premise(
            "lengths",
            "in a group with two right answers the shortest is on average at most 0.9 times the longest",
            "opd_lab.groups_premise:measure",
            {"shorter": 0.9},
        ),
    ),
    decision=(
        f"{STEPS} steps of 64 answers of up to {_LENGTH} tokens, 8 to a prompt; rates are swept for each arm by "
        "accuracy. Lengths are means over the last quarter of the steps, accuracies of the last weights without any "
        "length reward. A reward works if its answers are shorter and 95 % of GRPO's accuracy is kept."
    ),
    quick=QUICK_ONE,
    note="HAPO is not an arm: it compares with a prompt's shortest answer so far, and here no prompt comes again.",
)
