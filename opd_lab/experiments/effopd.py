"""(e) EffOPD: jumps along the path, at the paper's low learning rate, a third of the best and a swept one."""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, RATES, recipe

_FIRED = (Fires("effopd/accepted", ">", 0.0),)
_LOW = {"train.learning_rate": 1e-4}
"""The paper's low learning rate: a tenth of the best one here."""
_THIRD = {"train.learning_rate": 3e-4}


def _jumps(**gate: Any) -> dict[str, Any]:
    return {"methods": [{"name": "effopd", "until": 64, "gate": {"prompts": 50, **gate}}]}


_JUMPS = _jumps()


def _fewer(text: str, rate: str, measure: str, **more: Any) -> Claim:
    return Claim(text, f"effopd_{rate}", f"opd_{rate}", measure, "less", **more)


_RECIPE = recipe(steps=100, rows=256, length=16, objective={"name": "opd", "payload": "hidden"})
_RECIPE |= {"eval": {"every": 6, "prompts": 256, "temperature": 1.0}}
_RECIPE["train"]["warmup_steps"] = 0

EXPERIMENT = Experiment(
    name="effopd",
    letter="e",
    title="EffOPD: extrapolated steps",
    question=(
        "Jumping 3 to 11 times the displacement after steps 1, 2, 4, ... is said to reach the plateau in a third of "
        "the steps. Does it, with its gates paid for, and against a learning rate that was swept?"
    ),
    tasks=("addition",),
    recipe=_RECIPE,
    world="latent",
    served=("teacher",),
    evaluated=("base", "teacher"),
    arms=(
        Arm("opd_low", "OPD, a tenth of the best rate", _LOW),
        Arm("effopd_low", "EffOPD, a tenth of the best rate", _LOW | _JUMPS, fires=_FIRED),
        Arm("kl_low", "EffOPD, label-free gate, a tenth", _LOW | _jumps(kind="reverse_kl"), fires=_FIRED),
        Arm("opd_third", "OPD, a third of the best rate", _THIRD),
        Arm("effopd_third", "EffOPD, a third of the best rate", _THIRD | _JUMPS, fires=_FIRED),
        Arm("opd", "OPD, swept rate", {}, RATES),
        Arm("effopd", "EffOPD, swept rate", _JUMPS, RATES),
    ),
    claims=(
        _fewer("At a tenth of the rate EffOPD needs fewer steps than OPD", "low", "steps_to", premise="early"),
        _fewer(
            "At a tenth of the rate EffOPD needs a third of the steps, as published",
            "low",
            "steps_to",
            factor=3.0,
            premise="early",
        ),
        _fewer("At a tenth of the rate EffOPD needs fewer FLOPs than OPD, its gates counted", "low", "flops_to"),
        Claim("With the label-free gate too", "kl_low", "opd_low", "flops_to", "less"),
        _fewer("At a third of the rate EffOPD needs fewer FLOPs than OPD", "third", "flops_to"),
        Claim("At swept rates EffOPD needs fewer FLOPs than OPD", "effopd", "opd", "flops_to", "less"),
        Claim(
            "EffOPD at a tenth of the rate needs fewer FLOPs than OPD at a swept one",
            "effopd_low",
            "opd",
            "flops_to",
            "less",
        ),
        Claim(
            "EffOPD at a tenth of the rate needs fewer FLOPs than OPD at a third",
            "effopd_low",
            "opd_third",
            "flops_to",
            "less",
        ),
        Claim("At a tenth of the rate EffOPD ends more accurate", "effopd_low", "opd_low", "accuracy", "more"),
        Claim("At a third of the rate EffOPD ends more accurate", "effopd_third", "opd_third", "accuracy", "more"),
        Claim("At swept rates EffOPD ends more accurate", "effopd", "opd", "accuracy", "more"),
        Claim(
            "EffOPD at a tenth of the rate ends more accurate than OPD at a swept one",
            "effopd_low",
            "opd",
            "accuracy",
            "more",
        ),
    ),
    premises=(
        Premise(
            "early",
            "after a tenth of OPD's steps at the low rate, the displacement made as long as the final one has three "
            "fifths of the final gain",
            "opd_lab.jump_premise:early",
            {"arm": "opd_low", "least": 0.6},
        ),
        Premise(
            "line",
            "half as far again behind the teacher, on the straight line from the base, accuracy is no more than two "
            "points lower",
            "opd_lab.jump_premise:line",
            {"teacher": "teacher", "places": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0), "loss": 0.02},
        ),
    ),
    decision=(
        "100 steps of 256 answers without a warm-up, searches after steps 1, 2, 4, ..., 64, so that none comes after "
        "the last update; judged on the last weights, and on steps and FLOPs to 95 % of OPD's gain."
    ),
    changes=(
        "with the first results: the paired gate and the reset of moments were left out, for lack of time, and the "
        "premises were added",
        "with the results of the arms at a tenth of the best rate: no warm-up (of ten steps before, which lay inside "
        "the search), arms at a third of the best rate, and the published gate at the swept rate as well instead of "
        "the label-free one",
        "with the results: OPD at a third of the best rate as a rival of EffOPD at a tenth; the sweep goes by the last "
        "accuracy and had chosen, among rates that differ by less than chance there, the one that takes longest to it",
    ),
    quick={**QUICK, "methods.0.gate.prompts": 8},
)
