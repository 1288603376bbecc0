"""(g) Methods together: extrapolated rewards, extrapolated steps and adaptive windows in one recipe."""

from student.lab.experiment import Arm, Claim, Experiment, Fires
from student.lab.experiments.common import QUICK, RATES, recipe

_JUMPS = {"name": "effopd", "gate": {"kind": "reverse_kl", "prompts": 50}}
_WINDOW = {"name": "adwin", "windows": [4, 8], "every": 20, "null_every": 0}

EXPERIMENT = Experiment(
    name="combinations",
    letter="g",
    title="Methods together",
    question="ADWIN, ExOPD and EffOPD are three lines of one recipe. Do their effects add up?",
    tasks=("addition", "subtraction"),
    recipe=recipe(
        steps=100,
        rows=64,
        length=16,
        objective={"name": "gopd", "payload": "hidden", "aggregation": "constant"},
        teachers={"reference": "base"},
    ),
    served=("addition", "subtraction", "base"),
    routes={"addition": "addition", "subtraction": "subtraction"},
    evaluated=("base", "addition", "subtraction"),
    arms=(
        Arm("opd", "OPD", {}, RATES),
        Arm("exopd", "ExOPD", {"objective.0.reward_scale": 1.25}, same_rate_as="opd"),
        Arm(
            "exopd_effopd",
            "ExOPD and EffOPD",
            {"objective.0.reward_scale": 1.25, "methods": [_JUMPS]},
            same_rate_as="opd",
            fires=(Fires("effopd/accepted", ">", 0.0),),
        ),
        Arm(
            "all",
            "ADWIN, ExOPD and EffOPD",
            {"objective.0.reward_scale": 1.25, "methods": [_WINDOW, _JUMPS]},
            same_rate_as="opd",
            fires=(Fires("effopd/accepted", ">", 0.0), Fires("adwin/probes", ">", 0.0)),
        ),
    ),
    claims=(
        Claim("ExOPD and EffOPD together need fewer FLOPs than OPD", "exopd_effopd", "opd", "flops_to", "less"),
        Claim("ExOPD and EffOPD together are more accurate than ExOPD", "exopd_effopd", "exopd", "accuracy", "more"),
        Claim("All three together need fewer FLOPs than OPD", "all", "opd", "flops_to", "less"),
    ),
    quick=QUICK,
)
