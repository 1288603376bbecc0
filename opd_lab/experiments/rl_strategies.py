"""(r4) Rollout strategies: is it worth sampling until groups have something to teach?"""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.reinforcement import (
    KINDS,
    LABELLED,
    QUICK_KINDS,
    RATES_OFF,
    RATES_ON,
    STEPS,
    WORLD,
    off_policy,
    reinforce,
)


def _arm(name: str, title: str, metric: str, least: float = 0.0, **settings: Any) -> Arm:
    overrides = {"rollout.strategy": {"name": name, **settings}}
    return Arm(name, title, overrides, RATES_ON, fires=(Fires(metric, ">", least),))


_ARMS = (
    Arm("grpo", "GRPO", {}, RATES_ON),
    _arm("dynamic_sampling", "dynamic sampling: rounds until 8 groups are mixed", "rollout_rounds", 1.0),
    _arm(
        "adaptive_oversampling",
        "adaptive oversampling: one round, as large as the last were wasteful",
        "adaptive_oversampling/discarded_share",
    ),
    _arm("reinforce_ada", "Reinforce-Ada: rounds of 8 until 2 right and 2 wrong", "rollout_rounds", 1.0, rounds=3),
    _arm(
        "self_interference",
        "SELF: only prompts that greedy decoding does not solve",
        "self_interference/solved_share",
    ),
    Arm(
        "replay",
        "replay: a quarter of the groups from earlier steps, clip 0.2",
        {
            "objective": [{"name": "grpo", "rows": "all"}],
            "rollout.strategy": {"name": "replay", "share": 0.25},
            "train.minibatches": 4,
        },
        RATES_OFF,
        fires=(Fires("replayed_share", ">", 0.0), Fires("clipped_share", ">", 0.0)),
    ),
    off_policy(Fires("ratio", "<", 1.0), rows="all"),
)

_CLAIMS = (
    Claim("Dynamic sampling needs fewer tokens, its rounds counted", "dynamic_sampling", "grpo", "tokens_to", "less"),
    Claim("Dynamic sampling ends more accurate after equal steps", "dynamic_sampling", "grpo", "accuracy", "more"),
    Claim("At equal tokens it is more accurate", "dynamic_sampling", "grpo", "accuracy_at_tokens", "more"),
    Claim(
        "One large round needs fewer tokens than several",
        "adaptive_oversampling",
        "dynamic_sampling",
        "tokens_to",
        "less",
    ),
    Claim("Reinforce-Ada is more accurate at equal tokens", "reinforce_ada", "grpo", "accuracy_at_tokens", "more"),
    Claim("SELF is more accurate at equal tokens", "self_interference", "grpo", "accuracy_at_tokens", "more"),
    Claim("SELF keeps a higher pass@64", "self_interference", "grpo", "pass64", "more"),
    Claim("Replay needs fewer tokens than GRPO off policy", "replay", "off", "tokens_to", "less"),
)

EXPERIMENT = Experiment(
    name="rl_strategies",
    letter="r4",
    title="Rollout strategies",
    question=(
        "Groups whose answers are all right or all wrong teach nothing. Is it cheaper to sample until there are "
        "others, every token counted, than to make do with the groups that came?"
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
            "waste",
            "at least a tenth of the base's groups of 8 are all right or all wrong",
            "opd_lab.groups_premise:measure",
            {"equal": 0.1},
        ),
    ),
    decision=(
        f"{STEPS} steps that learn from 8 groups of 8 each, whatever was sampled for them; rates are swept for each "
        "arm. Tokens are all that were sampled, read off at 95 % of the rival's gain."
    ),
    quick=QUICK_KINDS,
    note=(
        "Prompts are of three kinds, asked by their marks, of which one is cut by the limit when it is answered in its "
        "own way. Strategies in rounds cannot be sampled ahead, so the lag is in the last arm alone. Strategies that "
        "hint (LTE, Guide, ICPO) are not arms: these students cannot read."
    ),
)
