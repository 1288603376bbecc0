"""Premise of ORBIT: the modes' teachers differ, so that there are modes to be fused.

Each teacher answers in its own mode within the budget; an answer that is cut is wrong. Of two neighbouring budgets, the
wider one must be used and must raise accuracy.
"""

from collections.abc import Sequence
from itertools import pairwise

from opd_lab.evaluate import measure_model
from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured

PROMPTS = {"full": 256, "quick": 8}
"""Number of problems, the same ones for every mode, by form."""


def measure(plan: ExperimentPlan, world: int, *, points: float = 0.10, ratio: float = 1.5) -> Measured:
    """Measure accuracy and tokens of the teachers, with 4 answers to each problem at temperature 1 and a greedy one.

    The premise is present if all neighbours differ by `points` and `ratio` at temperature 1, at which the experiment's
    claims are judged. The greedy numbers are only shown.

    Args:
        plan: gives the models, the modes and the prompts.
        world: seed of the world.
        points: least lead in accuracy of the wider of two neighbouring budgets.
        ratio: least ratio of its mean tokens to those of the narrower one.
    """
    experiment = plan.experiment
    modes = experiment.recipe["modes"]
    trained = [name for name in modes if modes[name].get("weight", 1)]
    data = plan.recipe(Arm("premise", ""), Replicate(world, experiment.seeds[0]), plan.default_rate())
    data["eval"] = {**data["eval"], "prompts": PROMPTS[plan.form]}

    def ask(**settings: float) -> list[tuple[float, float]]:
        found = []
        for name in trained:
            path = plan.models[world].model(experiment.routes[name]).path
            figures = measure_model({**data, "modes": {name: modes[name]}}, path, settings)["modes"]
            found.append((figures[f"accuracy/{name}"], figures[f"tokens/{name}"]))
        return found

    sampled, greedy = ask(samples=4), ask(samples=1, temperature=0.0)
    present = all(a - b >= points and s >= ratio * t for (a, s), (b, t) in pairwise(sampled))
    return Measured(present, f"at T = 1: {_in_words(trained, sampled)}; greedy: {_in_words(trained, greedy)}")


def _in_words(names: Sequence[str], found: Sequence[tuple[float, float]]) -> str:
    """Accuracy and tokens of each mode's teacher, and the differences of neighbours, in words."""
    each = ", ".join(f"{name} {a:.3f} in {t:.1f} tokens" for name, (a, t) in zip(names, found, strict=True))
    gaps = ", ".join(f"{100 * (a - b):+.1f} points and {s / t:.2f} times" for (a, s), (b, t) in pairwise(found))
    return f"{each}, neighbours {gaps}"
