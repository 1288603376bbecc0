"""(r1) Policy losses off policy: which bound on the ratio pays where answers are two steps old?"""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires
from opd_lab.experiments.reinforcement import (
    CREDIT,
    OFF_POLICY,
    QUICK_ONE,
    RATES_OFF,
    RATES_ON,
    STEPS,
    WORLD,
    reinforce,
)

_TARGET, _NEAR = 0.12, 0.02
"""Entropy that EntroPIC is to hold, and how close the mean of a run must be to it, in nats per token."""


def _off(name: str, title: str, fires: tuple[Fires, ...], **term: Any) -> Arm:
    """An off-policy arm. All losses are averaged like GRPO's, so that they differ only in how they treat the ratio."""
    objective = {"name": name, "aggregation": "sequence_mean", **term}
    return Arm(name, title, {"objective": [objective], **OFF_POLICY}, RATES_OFF, fires=fires)


def _acts(metric: str) -> tuple[Fires, ...]:
    return (Fires(metric, ">", 0.0),)


_ARMS = (
    Arm("grpo_on", "GRPO on policy: one update a step, no lag", {}, RATES_ON),
    _off("grpo", "GRPO, clip 0.2", _acts("clipped_share")),
    _off("policy_gradient", "null: the ratio without any bound", (Fires("ratio", "<", 1.0),)),
    _off("gspo", "GSPO, ratio of the response, clip 3e-4 and 4e-4", _acts("clipped_share")),
    _off("topr", "TOPR: right answers whole, wrong ones by a ratio of at most 1", _acts("tapered_share")),
    _off("rec", "REC one-sided: no ratio, tokens beyond 0.2 left out", _acts("dropped_share")),
    _off(
        "entropic",
        f"EntroPIC: GRPO's clip, entropy held at {_TARGET:g}",
        (*_acts("entropic_alpha"), *_acts("confident_share")),
        target=_TARGET,
        k_p=10,
        k_i=0.5,
    ),
)

_ENTROPY = "metric/student_entropy"
_CLAIMS = (
    Claim("Off policy, GRPO's clip is more accurate than no bound", "grpo", "policy_gradient", "accuracy", "more"),
    Claim("GRPO off policy needs fewer tokens than on policy", "grpo", "grpo_on", "tokens_to", "less"),
    Claim("GSPO is more accurate than GRPO off policy", "gspo", "grpo", "accuracy", "more"),
    Claim("TOPR is more accurate than GRPO off policy", "topr", "grpo", "accuracy", "more"),
    Claim("TOPR falls less deep than no bound", "topr", "policy_gradient", "fall", "less"),
    Claim("REC is more accurate than GRPO off policy", "rec", "grpo", "accuracy", "more"),
    Claim(f"EntroPIC's entropy is above {_TARGET - _NEAR:g}", "entropic", f"value:{_TARGET - _NEAR:g}", _ENTROPY),
    Claim(f"EntroPIC's is below {_TARGET + _NEAR:g}", "entropic", f"value:{_TARGET + _NEAR:g}", _ENTROPY, "less"),
    Claim("GRPO's entropy is below EntroPIC's", "grpo", "entropic", _ENTROPY, "less"),
    Claim("EntroPIC is more accurate than GRPO off policy", "entropic", "grpo", "accuracy", "more"),
    Claim("EntroPIC has a higher pass@64 than GRPO off policy", "entropic", "grpo", "pass64", "more"),
)

EXPERIMENT = Experiment(
    name="rl_losses",
    letter="r1",
    title="Policy losses off policy",
    question=(
        "On policy all policy losses are REINFORCE. With four updates a step on answers that are two steps old, which "
        "way of bounding the ratio is the most accurate after the same number of tokens? Does EntroPIC hold the "
        "entropy that it is set to?"
    ),
    tasks=("medium",),
    world=WORLD,
    recipe=reinforce(objective={"name": "grpo"}),
    served=("medium",),
    evaluated=("base", "medium"),
    arms=_ARMS,
    claims=_CLAIMS,
    premises=(CREDIT,),
    decision=(
        f"{STEPS} steps of 64 answers, 8 to a prompt, for every arm; off policy means 4 updates a step on answers of "
        "the weights two steps before. Rates are swept for each arm on a run seed of its own, one rate of the sweep "
        "of GRPO being where it is unstable. Judged on the last weights, so a run that fell counts as it ended. "
        "EntroPIC holds its entropy if the last quarter of the steps is within "
        f"{_NEAR:g} nats of {_TARGET:g} on average, a level that the base begins above and GRPO ends below; k_p is ten "
        "times its default, because the entropy and its errors are a tenth of a language model's."
    ),
    quick=QUICK_ONE,
    note=(
        "CISPO is not an arm: its cap of 5 bit one token in a thousand here, and up to the cap its gradient is that of "
        "the ratio without a bound."
    ),
)
