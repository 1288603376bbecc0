"""(r2) Advantages: what is compared with what, and over which deviation, on the same clipped or unclipped loss."""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires
from opd_lab.experiments.reinforcement import (
    CREDIT,
    QUICK_ONE,
    RATES_ON,
    STEPS,
    WORLD,
    off_policy,
    reinforce,
)


def _arm(key: str, title: str, fires: tuple[Fires, ...] = (), **advantage: Any) -> Arm:
    return Arm(key, title, {"objective.0.advantage": advantage}, RATES_ON, fires=fires)


_LEARNT = (Fires("advantage_magnitude", ">", 0.0),)
_ARMS = (
    _arm("grpo", "GRPO: the group's mean and deviation", _LEARNT, name="group_mean"),
    _arm("unscaled", "Dr. GRPO: the group's mean alone", _LEARNT, name="group_mean", scale="none"),
    _arm("whole", "REINFORCE++: mean and deviation of the whole batch", _LEARNT, name="reinforce_pp"),
    _arm("bnpo", "BNPO: a beta density fitted to the batch", (Fires("bnpo/alpha", ">", 1.0),), name="bnpo"),
    _arm("ngrpo", "NGRPO: a virtual right answer in every group", _LEARNT, name="ngrpo"),
    _arm("signed", "W-REINFORCE: right 0.1, wrong -1, no baseline", _LEARNT, name="signed"),
    off_policy(Fires("clipped_share", ">", 0.0)),
)

_CLAIMS = (
    Claim("Without the deviation fewer tokens are needed", "unscaled", "grpo", "tokens_to", "less"),
    Claim("Without the deviation it ends more accurate", "unscaled", "grpo", "accuracy", "more"),
    Claim("A baseline of the whole batch ends less accurate than the group's", "whole", "grpo", "accuracy", "less"),
    Claim("BNPO is more accurate than GRPO", "bnpo", "grpo", "accuracy", "more"),
    Claim("NGRPO needs fewer tokens than GRPO", "ngrpo", "grpo", "tokens_to", "less"),
    Claim("W-REINFORCE has a higher pass@64 than GRPO", "signed", "grpo", "pass64", "more"),
    Claim("W-REINFORCE keeps more entropy than GRPO", "signed", "grpo", "metric/student_entropy", "more"),
    Claim("GRPO off policy needs fewer tokens than on policy", "off", "grpo", "tokens_to", "less"),
)

EXPERIMENT = Experiment(
    name="rl_advantages",
    letter="r2",
    title="Advantages",
    question=(
        "The same rewards become credit in many ways. Which baseline and which divisor need the fewest tokens to "
        "GRPO's accuracy, and which keep the answers that the base had (pass@64)?"
    ),
    tasks=("medium",),
    world=WORLD,
    recipe=reinforce(),
    served=("medium",),
    evaluated=("base", "medium"),
    arms=_ARMS,
    claims=_CLAIMS,
    premises=(CREDIT,),
    decision=(
        f"{STEPS} steps of 64 answers, 8 to a prompt, one update a step for all but the last arm, so that the credit "
        "alone differs; rates are swept for each arm. Tokens are read off at 95 % of GRPO's gain, all else from the "
        "last weights."
    ),
    quick=QUICK_ONE,
    note=(
        "Leave-one-out is not an arm: it is the group's mean without the deviation times 8/7, which Adam does not see. "
        "Nor is a median: of binary rewards it is the majority."
    ),
)
