"""(c) Reward correction: with a larger teacher, is its own base the better reference?"""

from opd_lab.experiment import Arm, Claim, Experiment, Premise
from opd_lab.experiments.common import QUICK, recipe

_RATES = (2e-4, 5e-4, 1.5e-3)

EXPERIMENT = Experiment(
    name="correction",
    letter="c",
    title="Reward correction with a larger teacher",
    question=(
        "The teacher is larger than the student and was trained further from a base of its own. ExOPD extrapolates "
        "what that training changed only if the reference is that base; is it better than the student's start?"
    ),
    tasks=("addition",),
    world="larger",
    recipe=recipe(
        steps=200, rows=64, length=16, objective={"name": "gopd", "payload": "hidden"}, teachers={"reference": "base"}
    ),
    served=("large", "large_base", "base"),
    evaluated=("base", "large"),
    arms=(
        Arm("opd", "OPD", {"objective.0.reward_scale": 1.0}, _RATES),
        Arm(
            "student_start",
            "ExOPD, reference: the student's start",
            {"objective.0.reward_scale": 1.25},
            _RATES,
        ),
        Arm(
            "teacher_base",
            "ExOPD, reference: the teacher's base",
            {"objective.0.reward_scale": 1.25, "teachers.reference": "large_base"},
            _RATES,
        ),
    ),
    claims=(
        Claim(
            "The teacher's base is the better reference",
            "teacher_base",
            "student_start",
            "accuracy",
            "more",
            premise="fixed_point",
        ),
        Claim("ExOPD with the teacher's base is more accurate than OPD", "teacher_base", "opd", "accuracy", "more"),
        Claim("ExOPD with the student's start is more accurate than OPD", "student_start", "opd", "accuracy", "more"),
    ),
    quick=QUICK,
    premises=(
        Premise(
            "fixed_point",
            "sampling from T^1.25 R^-0.25, R the teacher's base, is more accurate than sampling from the teacher",
            "opd_lab.fixed_point:measure",
            {"scales": (1.0, 1.25, 1.5), "decisive": 1.25, "reference": "large_base"},
        ),
    ),
    decision=(
        "200 steps of 64 answers, each arm with a rate swept of its own; judged on the last weights, and about this "
        "number of tokens where an arm is not at its plateau. The teacher is larger than the student and was "
        "reinforced from its own base, as in the paper."
    ),
)
