"""Levels of models and runs: measured on the recipe's prompts, kept in files, never mixed up."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from opd_lab.evaluate import grade_model, grades, read_models
from opd_lab.experiment import ROUTED, Arm, Experiment
from opd_lab.experiments.common import QUICK, recipe
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels


@pytest.fixture
def plan(world: Path, tmp_path: Path) -> ExperimentPlan:
    summary = read_summary(world)
    assert summary is not None
    experiment = Experiment(
        name="two",
        letter="z",
        title="two",
        question="?",
        tasks=("addition", "subtraction"),
        world="domains",
        recipe=recipe(steps=4, rows=4, length=8, objective={"name": "opd", "payload": "sampled"}),
        served=("addition", "base"),
        routes={"addition": "addition", "subtraction": "base"},
        evaluated=("base", ROUTED),
        arms=(Arm("plain", "plain"),),
        claims=(),
        quick={**QUICK, "eval.prompts": 24},
    )
    return ExperimentPlan(experiment, "quick", tmp_path, {0: WorldModels(summary, "quick")}, ("127.0.0.1:1",))


def test_each_domain_counts_at_its_own_teachers_level(plan: ExperimentPlan) -> None:
    first = plan.replicates[0]
    parts = {"addition": (0.9, 0.1), "base": (0.3, 0.5)}
    for grade in [grade for grade in grades(plan, 0) if grade.replicate == first]:
        sums, differences = parts[grade.name]
        domains = {
            "addition": {"accuracy": sums, "prompts": 30},
            "subtraction": {"accuracy": differences, "prompts": 10},
        }
        part = {"accuracy": 0.0, "pass_at": {}, "domains": domains, "modes": {}}
        grade.file.parent.mkdir(parents=True, exist_ok=True)
        grade.file.write_text(json.dumps(dict.fromkeys(("sampled", "greedy", "wide"), part)))
    level = read_models(plan)[ROUTED]
    assert set(level) == {first}
    assert level[first].accuracy == pytest.approx((0.9 * 30 + 0.5 * 10) / 40) == level[first].greedy
    assert math.isnan(level[first].pass64)


def test_a_mode_counts_with_its_own_teachers_figures(plan: ExperimentPlan) -> None:
    modes = {"addition": {"budget": 8, "prefix": "A"}, "subtraction": {"budget": 4, "prefix": "S"}}
    plan = replace(plan, experiment=replace(plan.experiment, recipe={**plan.experiment.recipe, "modes": modes}))
    figures = {
        "addition": {"tokens/addition": 6.0, "accuracy/addition": 0.8, "tokens/subtraction": 9.0, "hypervolume": 0.1},
        "base": {"tokens/addition": 9.0, "accuracy/addition": 0.0, "tokens/subtraction": 3.0},
    }
    domains = {name: {"accuracy": 0.5, "prompts": 8} for name in modes}
    for grade in grades(plan, 0):
        part = {"accuracy": 0.0, "pass_at": {}, "domains": domains, "modes": figures[grade.name]}
        grade.file.parent.mkdir(parents=True, exist_ok=True)
        grade.file.write_text(json.dumps(dict.fromkeys(("sampled", "greedy", "wide"), part)))
    level = read_models(plan)[ROUTED][plan.replicates[0]]
    assert level.get("mode/neighbour_ratio/addition") == 2.0 and level.get("mode/tokens/subtraction") == 3.0
    assert level.get("mode/hypervolume") == pytest.approx(0.8 * 2 / 8)


def test_models_are_graded_by_domain_with_pass_at_k_and_only_once(plan: ExperimentPlan) -> None:
    waiting = grades(plan, 0)
    assert len(waiting) == 4  # two models, two seeds
    grade_model(waiting[0])
    assert len(grades(plan, 0)) == 3
    data = json.loads(waiting[0].file.read_text())
    assert {name: part["prompts"] for name, part in data["sampled"]["domains"].items()} == {
        "addition": 12,
        "subtraction": 12,
    }
    level = read_models(plan)["base"][plan.replicates[0]]
    assert level.accuracy == data["sampled"]["pass_at"]["1"][0] <= level.pass8
    assert data["wide"]["prompts"] == 6 and level.pass64 == data["wide"]["pass_at"]["64"][0]
