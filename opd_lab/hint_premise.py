"""Premise of self-distillation with a hint: a student that is told the result is right more often than untold."""

from opd_lab.evaluate import measure_model
from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured
from opd_lab.tiny.presets import world_plan

PROMPTS = {"full": 128, "quick": 6}
"""Number of prompts, each answered once at temperature 1, by form."""


def measure(plan: ExperimentPlan, world: int, *, told: dict[str, str], gain: float) -> Measured:
    """Measure each model's accuracy at temperature 1 with and without the hint.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        told: for each model, the task of the world whose prompts tell it the result as its context does.
        gain: least rise of each model's accuracy with the hint for the premise to be present.
    """
    experiment = plan.experiment
    data = plan.recipe(Arm("premise", ""), Replicate(world, experiment.seeds[0]), plan.default_rate())
    settings = {"samples": 1, "prompts": PROMPTS[plan.form], "temperature": 1.0}
    tasks = world_plan(str(experiment.world_file)).tasks
    said, present = [], True
    for model, task in told.items():
        path = plan.models[world].model(model).path
        with_hint = {**data, "prompts": tasks[task].model_dump(mode="json", exclude_defaults=True)}
        untold, knowing = (measure_model(one, path, settings)["accuracy"] for one in (data, with_hint))
        present = present and knowing - untold >= gain
        said.append(f"{model} {untold:.2f} untold, {knowing:.2f} told")
    return Measured(present, "; ".join(said))
