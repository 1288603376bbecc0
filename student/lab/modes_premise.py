"""Premise of ORBIT: the modes' teachers differ, so that there are modes to be fused.

Each teacher answers in its own mode, at temperature 1, within the budget; an answer that is cut is wrong. Between
neighbouring budgets the wider one must be worth its tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

from student.lab.evaluate import measure_model
from student.lab.experiment import Arm, Replicate
from student.lab.plan import ExperimentPlan
from student.lab.premises import Measured

PROMPTS = {"full": 256, "quick": 8}
"""Problems, the same for every mode."""


def measure(plan: ExperimentPlan, world: int, *, points: float = 0.10, ratio: float = 1.5) -> Measured:
    """Accuracy and tokens of the teachers, of 4 answers to a problem at temperature 1 and of greedy ones.

    The premise is present where every neighbour differs by `points` and `ratio` at temperature 1, at which the
    experiment's claims are judged; the greedy numbers are shown beside.

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
    """What each mode's teacher reached, and how neighbours differ."""
    each = ", ".join(f"{name} {a:.3f} in {t:.1f} tokens" for name, (a, t) in zip(names, found, strict=True))
    gaps = ", ".join(f"{100 * (a - b):+.1f} points and {s / t:.2f} times" for (a, s), (b, t) in pairwise(found))
    return f"{each}, neighbours {gaps}"
