"""What a model knows more when it is told is measured on the told problems of its world."""

from pathlib import Path
from random import Random

import pytest

from opd.tasks.procedural import load_task
from opd_lab.experiments import load_experiment
from opd_lab.hint_premise import measure
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.presets import world_plan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels
from student.scoring.contexts import Context
from student.settings.contexts import ContextSettings


def test_told_models_are_asked_the_told_problems(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    plan = ExperimentPlan(load_experiment("hints"), "quick", tmp_path, {0: WorldModels(summary, "quick")})
    told = {"terse": "told_at_once"}
    found = measure(plan, 0, told=told, gain=0.0)
    assert found.numbers.startswith("terse ") and found.numbers.endswith(" told")
    assert not measure(plan, 0, told=told, gain=1.01).present


@pytest.mark.parametrize("told", ["told", "told_at_once"])
def test_teachers_read_problems_as_the_worlds_told_ones_are_written(told: str) -> None:
    experiment = load_experiment("hints")
    tasks = world_plan(str(experiment.world_file)).tasks
    plain, wanted = (load_task(tasks[name]).draw(Random(3)) for name in ("sums", told))
    for arm in experiment.arms:
        for role, context in arm.overrides.get("contexts", {}).items():
            read = Context(role, ContextSettings.model_validate(context)).render(plain)
            assert read.text == wanted.text != plain.text
