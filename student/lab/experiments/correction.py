"""(c) Reward correction: with a larger teacher, is its own base the better reference?"""

from student.lab.experiment import Arm, Claim, Experiment
from student.lab.experiments.common import QUICK, RATES, recipe

EXPERIMENT = Experiment(
    name="correction",
    letter="c",
    title="Reward correction with a larger teacher",
    question=(
        "The teacher is larger than the student and was trained further from a base of its own. ExOPD extrapolates "
        "what that training changed only if the reference is that base; is it better than the student's start?"
    ),
    tasks=("addition", "subtraction"),
    recipe=recipe(
        steps=300, rows=64, length=48, objective={"name": "gopd", "payload": "hidden"}, teachers={"reference": "base"}
    ),
    served=("large", "large_base", "base"),
    routes={"addition": "large", "subtraction": "large"},
    evaluated=("base", "large"),
    arms=(
        Arm("opd", "OPD", {"objective.0.reward_scale": 1.0}, RATES),
        Arm(
            "student_start",
            "ExOPD, reference: the student's start",
            {"objective.0.reward_scale": 1.25},
            same_rate_as="opd",
        ),
        Arm(
            "teacher_base",
            "ExOPD, reference: the teacher's base",
            {"objective.0.reward_scale": 1.25, "teachers.reference": "large_base"},
            same_rate_as="opd",
        ),
    ),
    claims=(
        Claim("The teacher's base is the better reference", "teacher_base", "student_start", "accuracy", "more"),
        Claim("ExOPD with the teacher's base is more accurate than OPD", "teacher_base", "opd", "accuracy", "more"),
        Claim("ExOPD with the student's start is more accurate than OPD", "student_start", "opd", "accuracy", "more"),
    ),
    quick=QUICK,
    note=(
        "The larger teacher was fine-tuned further, not reinforced. Answers may be longer than elsewhere: it "
        "restates many of its results."
    ),
)
