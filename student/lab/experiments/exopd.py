"""(b) ExOPD: does the student pass its teachers, one or two, when their reward is scaled up?"""

from student.lab.experiment import Arm, Claim, Experiment
from student.lab.experiments.common import QUICK, recipe

_RATE = 5e-4


def _arm(name: str, title: str, scale: float) -> Arm:
    return Arm(name, title, {"objective.0.reward_scale": scale})


def _base() -> dict[str, object]:
    base = recipe(
        steps=200, rows=64, length=16, objective={"name": "gopd", "payload": "hidden"}, teachers={"reference": "base"}
    )
    return {**base, "train": {**base["train"], "learning_rate": _RATE}}


ARMS = (
    _arm("half", "lambda 0.5", 0.5),
    _arm("opd", "lambda 1: OPD", 1.0),
    _arm("exopd", "lambda 1.25: ExOPD", 1.25),
    _arm("exopd15", "lambda 1.5", 1.5),
    _arm("exopd2", "lambda 2", 2.0),
)

EXPERIMENT = Experiment(
    name="exopd",
    letter="b",
    title="ExOPD with two domain teachers",
    question=(
        "Sums and differences each have a teacher reinforced from the student. One student learns from both, with the "
        "implicit reward log T - log R scaled by lambda and the student's start as the reference R. Does it pass them?"
    ),
    tasks=("addition", "subtraction"),
    recipe=_base(),
    served=("addition", "subtraction", "base"),
    routes={"addition": "addition", "subtraction": "subtraction"},
    evaluated=("base", "addition", "subtraction"),
    arms=ARMS,
    claims=(
        Claim("ExOPD is more accurate than OPD", "exopd", "opd", "accuracy", "more"),
        Claim("Lambda 1.5 is more accurate than OPD", "exopd15", "opd", "accuracy", "more"),
        Claim("Lambda 2 is more accurate than OPD", "exopd2", "opd", "accuracy", "more"),
        Claim(
            "One OPD student is more accurate on both domains than the teacher of sums",
            "opd",
            "model:addition",
            "accuracy",
            "more",
        ),
        Claim("Lambda 0.5 lies below OPD", "half", "opd", "accuracy", "less"),
    ),
    quick=QUICK,
    note="All arms at one learning rate, 5e-4; lambda 1 is the baseline.",
)
