"""(b) ExOPD: does the student pass its teachers, one or two, when their reward is scaled up?"""

from collections.abc import Mapping
from typing import Any

from opd_lab.experiment import ROUTED, Arm, Claim, Experiment, Premise
from opd_lab.experiments.common import QUICK, claims_about, recipe

_RATES = (2e-4, 5e-4, 1.5e-3)
_DECISION = (
    "500 steps of 64 answers, which lambda 1 needs to its plateau, each lambda with a rate swept of its own; judged on "
    "the last weights. The premise is the accuracy of the fixed point, which a student cannot pass by distilling it."
)
_DECISION_OF_TWO = (
    "300 steps of 64 answers, each lambda with a rate of its own of the two that were best with one teacher; judged on "
    "the last weights, and about this number of tokens where an arm is not at its plateau. The premise is the accuracy "
    "of the fixed point, each prompt under its own teacher."
)
_NOTE = "Scaling the reward sharpens the student: greedy accuracy and pass@64 say how much of a gain is more than that."
_PREMISE = Premise(
    "fixed_point",
    "sampling from T^lambda R^(1 - lambda), lambda 1.25, is more accurate than sampling from the teacher",
    "opd_lab.fixed_point:measure",
    {"scales": (1.0, 1.25, 1.5), "decisive": 1.25},
)


def _arms(rates: tuple[float, ...]) -> tuple[Arm, ...]:
    scales = {"half": 0.5, "opd": 1.0, "exopd": 1.25, "exopd15": 1.5}
    titles = {"opd": "lambda 1: OPD", "exopd": "lambda 1.25: ExOPD"}
    return tuple(
        Arm(name, titles.get(name, f"lambda {scale:g}"), {"objective.0.reward_scale": scale}, rates)
        for name, scale in scales.items()
    )


def _experiment(
    name: str,
    letter: str,
    title: str,
    question: str,
    teacher: str,
    *,
    steps: int,
    arms: tuple[Arm, ...],
    **more: Any,
) -> Experiment:
    """An experiment that sweeps lambda; `teacher` is the level to exceed, "model:NAME"."""
    claims = (
        Claim("ExOPD is more accurate than OPD", "exopd", "opd", "accuracy", "more", premise="fixed_point"),
        Claim("ExOPD is more accurate than OPD, greedy", "exopd", "opd", "greedy", "more"),
        Claim("ExOPD has a higher pass@64 than OPD", "exopd", "opd", "pass64", "more"),
        Claim("Lambda 1.5 is more accurate than OPD", "exopd15", "opd", "accuracy", "more"),
        Claim("Lambda 0.5 lies below OPD", "half", "opd", "accuracy", "less"),
        Claim("OPD passes the teacher", "opd", teacher, "accuracy", "more"),
        Claim("ExOPD passes the teacher", "exopd", teacher, "accuracy", "more", premise="fixed_point"),
        Claim("ExOPD passes the teacher, greedy", "exopd", teacher, "greedy", "more"),
        Claim("Lambda 1.5 passes the teacher", "exopd15", teacher, "accuracy", "more"),
    )
    return Experiment(
        name=name,
        letter=letter,
        title=title,
        question=question,
        recipe=recipe(
            steps=steps,
            rows=64,
            length=16,
            objective={"name": "gopd", "payload": "hidden"},
            teachers={"reference": "base"},
        ),
        arms=arms,
        claims=claims_about(claims, arms),
        quick=QUICK,
        premises=(_PREMISE,),
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
    "model:teacher",
    steps=500,
    arms=_arms(_RATES),
    tasks=("addition",),
    served=("teacher", "base"),
    evaluated=("base", "teacher"),
    decision=_DECISION,
    changes=("after 13 of the 15 runs of the sweep: lambda 2 was left out, for lack of time",),
)

TWO = _experiment(
    "exopd",
    "b2",
    "ExOPD with two domain teachers",
    "Sums and differences each have a teacher reinforced from the student. One student learns from both, with the "
    "implicit reward log T - log R scaled by lambda and the student's start as the reference R. Does it pass them, "
    "each on its own domain?",
    f"model:{ROUTED}",
    steps=300,
    arms=_arms(_RATES[:2])[1:],
    tasks=("addition", "subtraction"),
    world="domains",
    served=("addition", "subtraction", "base"),
    routes=_ROUTES,
    evaluated=("base", "addition", "subtraction", ROUTED),
    decision=_DECISION_OF_TWO,
)
