"""(g) Methods together: extrapolated rewards and steps and adaptive windows, each alone and all in one recipe."""

from opd_lab.experiment import Arm, Claim, Experiment, Fires
from opd_lab.experiments.common import QUICK, RATES, recipe

_JUMPS = {"name": "effopd", "gate": {"kind": "reverse_kl", "prompts": 50}}
_WINDOW = {"name": "adwin", "windows": [4, 8], "every": 20, "null_every": 0}
_SCALE = {"objective.0.reward_scale": 1.25}
_JUMPED = Fires("effopd/accepted", ">", 0.0)
_PROBED = Fires("adwin/probes", ">", 0.0)

EXPERIMENT = Experiment(
    name="combinations",
    letter="g",
    title="Methods together",
    question="ADWIN, ExOPD and EffOPD are three lines of one recipe. What does each do alone, and what all together?",
    tasks=("addition",),
    recipe=recipe(
        steps=100,
        rows=64,
        length=16,
        objective={"name": "gopd", "payload": "hidden", "aggregation": "constant"},
        teachers={"reference": "base"},
    ),
    served=("teacher", "base"),
    evaluated=("base", "teacher"),
    arms=(
        Arm("opd", "OPD", {}, RATES),
        Arm("adwin", "ADWIN", {"methods": [_WINDOW]}, same_rate_as="opd", fires=(_PROBED,)),
        Arm("exopd", "ExOPD", _SCALE, same_rate_as="opd"),
        Arm("effopd", "EffOPD", {"methods": [_JUMPS]}, same_rate_as="opd", fires=(_JUMPED,)),
        Arm("exopd_effopd", "ExOPD and EffOPD", {**_SCALE, "methods": [_JUMPS]}, same_rate_as="opd", fires=(_JUMPED,)),
        Arm(
            "all",
            "ADWIN, ExOPD and EffOPD",
            {**_SCALE, "methods": [_WINDOW, _JUMPS]},
            same_rate_as="opd",
            fires=(_JUMPED, _PROBED),
        ),
    ),
    claims=(
        Claim("ADWIN alone needs fewer FLOPs than OPD", "adwin", "opd", "flops_to", "less"),
        Claim("EffOPD alone needs fewer FLOPs than OPD", "effopd", "opd", "flops_to", "less"),
        Claim("ExOPD and EffOPD together need fewer FLOPs than OPD", "exopd_effopd", "opd", "flops_to", "less"),
        Claim("ExOPD and EffOPD together are more accurate than ExOPD", "exopd_effopd", "exopd", "accuracy", "more"),
        Claim("All three together need fewer FLOPs than OPD", "all", "opd", "flops_to", "less"),
        Claim("All three together are more accurate than ExOPD", "all", "exopd", "accuracy", "more"),
    ),
    decision=(
        "100 steps of 64 answers, all at the rate swept for OPD: the question is what a line more in a recipe does. "
        "Judged on the last weights and on FLOPs to 95 % of OPD's gain."
    ),
    quick=QUICK,
)
