"""(b) ExOPD: does the student pass its teachers, one or two, when their reward is scaled up?"""

from collections.abc import Mapping
from typing import Any

from student.lab.experiment import ROUTED, Arm, Claim, Experiment
from student.lab.experiments.common import QUICK, recipe

_RATE = 5e-4
_NOTE = (
    "All arms at one learning rate, 5e-4; lambda 1 is the baseline. Scaling the reward sharpens the student: the "
    "greedy accuracy says how much of a gain is more than that."
)


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


def _experiment(name: str, letter: str, title: str, question: str, teacher: str, **more: Any) -> Experiment:
    """The sweep of lambda; `teacher` names the level to pass, "model:NAME"."""
    return Experiment(
        name=name,
        letter=letter,
        title=title,
        question=question,
        recipe=_base(),
        arms=ARMS,
        claims=(
            Claim("ExOPD is more accurate than OPD", "exopd", "opd", "accuracy", "more"),
            Claim("ExOPD is more accurate than OPD, greedy", "exopd", "opd", "greedy", "more"),
            Claim("Lambda 1.5 is more accurate than OPD", "exopd15", "opd", "accuracy", "more"),
            Claim("Lambda 2 is more accurate than OPD", "exopd2", "opd", "accuracy", "more"),
            Claim("Lambda 0.5 lies below OPD", "half", "opd", "accuracy", "less"),
            Claim("OPD passes the teacher", "opd", teacher, "accuracy", "more"),
            Claim("ExOPD passes the teacher", "exopd", teacher, "accuracy", "more"),
            Claim("ExOPD passes the teacher, greedy", "exopd", teacher, "greedy", "more"),
            Claim("Lambda 1.5 passes the teacher", "exopd15", teacher, "accuracy", "more"),
        ),
        quick=QUICK,
        note=_NOTE,
        **more,
    )


_ROUTES: Mapping[str, str] = {"addition": "addition", "subtraction": "subtraction"}

ONE = _experiment(
    "exopd_one",
    "b1",
    "ExOPD with one teacher",
    "The teacher was reinforced from the student. The student learns from it with the implicit reward log T - log R "
    "scaled by lambda and its own start as the reference R. Does it pass its teacher?",
    "model:addition",
    tasks=("addition",),
    served=("addition", "base"),
    evaluated=("base", "addition"),
)

TWO = _experiment(
    "exopd",
    "b2",
    "ExOPD with two domain teachers",
    "Sums and differences each have a teacher reinforced from the student. One student learns from both, with the "
    "implicit reward log T - log R scaled by lambda and the student's start as the reference R. Does it pass them, "
    "each on its own domain?",
    f"model:{ROUTED}",
    tasks=("addition", "subtraction"),
    served=("addition", "subtraction", "base"),
    routes=_ROUTES,
    evaluated=("base", "addition", "subtraction", ROUTED),
)
