"""Premise of ORBIT: the modes' teachers differ, so that there are modes to be fused.

Each teacher answers in its own mode, at temperature 1, within the budget; an answer that is cut is wrong. Between
neighbouring budgets the wider one must be worth its tokens.
"""

from itertools import pairwise

from student.lab.evaluate import measure_model
from student.lab.experiment import Arm, Replicate
from student.lab.plan import ExperimentPlan
from student.lab.premises import Measured

PROMPTS = {"full": 512, "quick": 8}
"""Problems, each asked in every mode."""


def measure(plan: ExperimentPlan, world: int, *, points: float = 0.10, ratio: float = 1.5) -> Measured:
    """Accuracy and tokens of the teachers; present where every neighbour differs by `points` and `ratio`.

    Args:
        plan: gives the models, the modes and the prompts.
        world: seed of the world.
        points: accuracy that the wider of two neighbours is ahead by, at least.
        ratio: its tokens over those of the narrower one, at least.
    """
    experiment = plan.experiment
    modes = experiment.recipe["modes"]
    trained = [name for name in modes if modes[name].get("weight", 1)]
    data = plan.recipe(Arm("premise", ""), Replicate(world, experiment.seeds[0]), plan.default_rate())
    data["eval"] = {**data["eval"], "prompts": PROMPTS[plan.form] * len(modes)}
    found = {}
    for name in trained:
        figures = measure_model(data, plan.models[world].model(experiment.routes[name]).path, {"samples": 1})["modes"]
        found[name] = figures[f"accuracy/{name}"], figures[f"tokens/{name}"]
    numbers = ", ".join(f"{name} {accuracy:.3f} in {tokens:.1f} tokens" for name, (accuracy, tokens) in found.items())
    gaps = [(a - b, s / t) for (a, s), (b, t) in pairwise(found[name] for name in trained)]
    shown = ", ".join(f"{100 * gap:+.1f} points and {times:.2f} times" for gap, times in gaps)
    return Measured(all(gap >= points and times >= ratio for gap, times in gaps), f"{numbers}; neighbours {shown}")
