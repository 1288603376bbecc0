"""(e) EffOPD: jumps along the path, at the paper's low learning rate and at swept ones, with two of its gates."""

from typing import Any

from student.lab.experiment import Arm, Claim, Experiment, Fires, Premise
from student.lab.experiments.common import QUICK, RATES, recipe

_FIRED = (Fires("effopd/accepted", ">", 0.0),)
_LOW = {"train.learning_rate": 1e-4}
"""A tenth of the best rate."""


def _jumps(**gate: Any) -> dict[str, Any]:
    return {"methods": [{"name": "effopd", "until": 64, "gate": {"prompts": 50, **gate}}]}


_LABEL_FREE = _jumps(kind="reverse_kl")

EXPERIMENT = Experiment(
    name="effopd",
    letter="e",
    title="EffOPD: extrapolated steps",
    question=(
        "Jumping 3 to 11 times the displacement after steps 1, 2, 4, ... is said to reach the plateau in a third of "
        "the steps. Does it, with its gates paid for, and against a learning rate that was swept?"
    ),
    tasks=("addition",),
    recipe=recipe(steps=100, rows=256, length=16, objective={"name": "opd", "payload": "hidden"})
    | {"eval": {"every": 6, "prompts": 256, "temperature": 1.0}},
    world="latent",
    served=("teacher",),
    evaluated=("base", "teacher"),
    arms=(
        Arm("opd_low", "OPD, a tenth of the best rate", _LOW),
        Arm("effopd_low", "EffOPD, accuracy gate, low rate", _LOW | _jumps(), fires=_FIRED),
        Arm("kl_low", "EffOPD, label-free gate, low rate", _LOW | _LABEL_FREE, fires=_FIRED),
        Arm("opd", "OPD, swept rate", {}, RATES),
        Arm("kl", "EffOPD, label-free gate, swept rate", _LABEL_FREE, RATES),
    ),
    claims=(
        Claim(
            "At a low rate EffOPD needs fewer steps than OPD",
            "effopd_low",
            "opd_low",
            "steps_to",
            "less",
            premise="early",
        ),
        Claim(
            "At a low rate EffOPD needs a third of the steps, as published",
            "effopd_low",
            "opd_low",
            "steps_to",
            "less",
            factor=3.0,
            premise="early",
        ),
        Claim(
            "At a low rate EffOPD needs fewer FLOPs than OPD, its gates counted",
            "effopd_low",
            "opd_low",
            "flops_to",
            "less",
        ),
        Claim("With the label-free gate too", "kl_low", "opd_low", "flops_to", "less"),
        Claim("At a low rate EffOPD ends more accurate", "effopd_low", "opd_low", "accuracy", "more"),
        Claim("EffOPD at a low rate beats OPD at a swept rate", "effopd_low", "opd", "accuracy", "more"),
        Claim("At swept rates EffOPD needs fewer FLOPs than OPD", "kl", "opd", "flops_to", "less"),
        Claim("At swept rates EffOPD ends more accurate", "kl", "opd", "accuracy", "more"),
    ),
    premises=(
        Premise(
            "early",
            "after a tenth of OPD's steps at the low rate, the displacement made as long as the final one has three "
            "fifths of the final gain",
            "student.lab.jump_premise:early",
            {"arm": "opd_low", "least": 0.6},
        ),
        Premise(
            "line",
            "half as far again behind the teacher, on the straight line from the base, accuracy is no more than two "
            "points lower",
            "student.lab.jump_premise:line",
            {"teacher": "teacher", "places": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0), "loss": 0.02},
        ),
    ),
    decision=(
        "100 steps of 256 answers, the first ten at a rising rate, searches after steps 1, 2, 4, ..., 64, so that none "
        "comes after the last update; judged on the last weights, and on steps and FLOPs to 95 % of OPD's gain."
    ),
    changes=(
        "with the first results: the paired gate and the reset of moments were left out, for lack of time, and the "
        "premises were added",
    ),
    quick={**QUICK, "methods.0.gate.prompts": 8},
)
