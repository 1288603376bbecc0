"""Premise of rollout windows: the gradient of the beginning of an answer points in the direction of the full gradient.

The student answers prompts before any training and the teacher scores them, as `opd premise` does for a recipe.
Measured are the cosine of each prefix's gradient with the full one, cross-fitted so that noise does not look like
agreement; the cosine for the same number of random tokens, which is 1 but for noise; and, by decile of the answer, how
often the student's token is the teacher's first choice.
"""

from collections.abc import Sequence
from dataclasses import replace

from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.predict import PremiseReport, Window
from opd_lab.predict import measure as predict
from opd_lab.premises import Measured
from opd_lab.world import served
from student.settings.recipe import Recipe

ROWS = {"full": 256, "quick": 8}
"""Number of answers, one per prompt, by form."""


def measure(plan: ExperimentPlan, world: int, *, least: float, teacher: str | None = None) -> Measured:
    """Measure the cosines of prefixes and of random tokens, and the teacher's agreement by decile.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        least: least cosine of the first quarter for the premise to be present.
        teacher: name of the served teacher; None for that of the recipe.
    """
    experiment = plan.experiment
    with served(plan.models[world], experiment.served, plan.world_folder(world) / "premise") as addresses:
        arm = Arm("premise", "", {} if teacher is None else {"teachers.default": teacher})
        here = replace(plan, addresses=addresses)
        data = here.recipe(arm, Replicate(world, experiment.seeds[0]), plan.default_rate())
        report = predict(Recipe.model_validate({"run": "unused", **data}), rows=ROWS[plan.form])
    decisive = quarter(report.windows)
    present = decisive is not None and decisive.cross_fitted >= least
    return Measured(present, _words(report))


def quarter(windows: Sequence[Window]) -> Window | None:
    """The window of a quarter of the longest answer, which is the second widest; None if answers are too short."""
    return windows[-2] if len(windows) > 1 else None


def _words(report: PremiseReport) -> str:
    cosines = ", ".join(f"{w.tokens} tokens {w.cross_fitted:.2f} (random {w.random:.2f})" for w in report.windows)
    agreement = ", ".join(f"{share:.2f}" for share in report.agreement)
    divergence = ", ".join(f"{nats:.2f}" for nats in report.by_decile)
    return (
        f"cosine of the first {cosines}; by tenth of the answer the teacher's first choice in {agreement}, "
        f"log-ratio {divergence} nats"
    )
