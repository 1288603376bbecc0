"""(r3) Prompt samplers: do GPS, MoPPS and SEC save rollouts, against a random choice from as many candidates?"""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.reinforcement import (
    KINDS,
    LABELLED,
    QUICK_KINDS,
    RATES_ON,
    STEPS,
    WORLD,
    off_policy,
    reinforce,
)


def _arm(name: str, title: str, **settings: Any) -> Arm:
    method = {"name": name, "candidates": 4, **settings}
    fires = (Fires(f"{name}/replaced", ">", 0.0), *((Fires(f"{name}/known", ">", 0.0),) if name in _KNOWS else ()))
    return Arm(name, title, {"methods": [method]}, same_rate_as="grpo", fires=fires)


_KNOWS = ("mopps", "gps", "sec")
_ARMS = (
    Arm("grpo", "GRPO, prompts as they come", {}, RATES_ON),
    _arm("random_prompts", "null: a random choice of a quarter"),
    _arm("mopps", "MoPPS: a posterior of each kind's success", by="domain"),
    _arm("gps", "GPS: a model that predicts success from the prompt"),
    _arm("sec", "SEC: a bandit over kinds, paid by |A|", tau=0.1),
    Arm(
        "dynamic_sampling",
        "dynamic sampling: the choice after the rollouts",
        {"rollout.strategy": {"name": "dynamic_sampling"}},
        same_rate_as="grpo",
        fires=(Fires("rollout_rounds", ">", 1.0),),
    ),
    off_policy(Fires("ratio", "<", 1.0)),
)

_CLAIMS = (
    *(
        Claim(f"{title} needs fewer tokens than a random choice", name, "random_prompts", "tokens_to", "less")
        for name, title in (("mopps", "MoPPS"), ("gps", "GPS"), ("sec", "SEC"))
    ),
    *(
        Claim(f"{title} needs fewer tokens than dynamic sampling", name, "dynamic_sampling", "tokens_to", "less")
        for name, title in (("mopps", "MoPPS"), ("gps", "GPS"))
    ),
    *(
        Claim(f"{title} ends more accurate than a random choice", name, "random_prompts", "accuracy", "more")
        for name, title in (("mopps", "MoPPS"), ("gps", "GPS"), ("sec", "SEC"))
    ),
)

EXPERIMENT = Experiment(
    name="rl_samplers",
    letter="r3",
    title="Prompt samplers",
    question=(
        "Samplers choose prompts that the student solves about half of the time, before they are answered. Does that "
        "reach plain GRPO's accuracy with fewer sampled tokens than a random choice, or than dropping groups after it?"
    ),
    tasks=KINDS,
    world=WORLD,
    recipe=reinforce() | LABELLED,
    served=("medium",),
    evaluated=("base", "medium"),
    arms=_ARMS,
    claims=_CLAIMS,
    premises=(
        Premise(
            "apart",
            "the kind of prompts that the base solves most is solved 20 points more often than the one it solves least",
            "opd_lab.groups_premise:measure",
            {"apart": 0.2},
        ),
    ),
    decision=(
        f"{STEPS} steps of 64 answers, 8 to a prompt; samplers choose 8 of 32 prompts by kind or by what they say, at "
        "the rate swept for GRPO: the question is what a line more in a recipe does. Tokens are all that were sampled, "
        "read off at 95 % of the rival's gain. A sampler saves rollouts if it beats the random choice, else not."
    ),
    quick=QUICK_KINDS,
    note=(
        "Accuracy is over all three kinds, so that a sampler that leaves one of them out pays for it. Samplers plan by "
        "the outcomes of the last step and cannot be planned ahead, so the lag is in the last arm alone. What needs "
        "prompts to come again (positive-negative pairing, DRIVE, MoPPS by prompt) is not an arm: here none does."
    ),
)
