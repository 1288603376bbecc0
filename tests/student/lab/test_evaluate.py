"""Levels of models and runs: measured on the recipe's prompts, kept in files, never mixed up."""

import json
from pathlib import Path

import pytest

from student.lab.evaluate import Level, grade_models, read_greedy, read_models
from student.lab.experiment import ROUTED, Arm, Experiment
from student.lab.experiments.common import QUICK, recipe
from student.lab.plan import Plan
from student.lab.runs import beside
from student.lab.tiny.summary import read_summary
from student.lab.world import Cast, served


@pytest.fixture
def plan(world: Path, tmp_path: Path) -> Plan:
    summary = read_summary(world)
    assert summary is not None
    experiment = Experiment(
        name="two",
        letter="z",
        title="two",
        question="?",
        tasks=("addition", "subtraction"),
        recipe=recipe(steps=4, rows=4, length=8, objective={"name": "opd", "payload": "sampled"}),
        served=("addition", "base"),
        routes={"addition": "addition", "subtraction": "base"},
        evaluated=("base", ROUTED),
        arms=(Arm("plain", "plain"),),
        claims=(),
        seeds=(0, 1),
        quick={**QUICK, "eval.prompts": 24},
    )
    return Plan(experiment, "quick", tmp_path, Cast(summary, "quick"), ("127.0.0.1:1",))


def test_each_domain_counts_at_its_own_teachers_level(plan: Plan) -> None:
    folder = plan.folder / "levels"
    folder.mkdir(parents=True)
    for name, (sums, differences) in {"addition": (0.9, 0.1), "base": (0.3, 0.5)}.items():
        domains = {
            "addition": {"accuracy": sums, "prompts": 30},
            "subtraction": {"accuracy": differences, "prompts": 10},
        }
        part = {"accuracy": 0.0, "domains": domains}
        (folder / f"{name}-0.json").write_text(json.dumps({"sampled": part, "greedy": part}))
    level = read_models(plan)[ROUTED]
    assert set(level) == {0}
    assert level[0].accuracy == pytest.approx((0.9 * 30 + 0.5 * 10) / 40) == level[0].greedy


def test_a_greedy_level_of_another_recipe_is_not_read(plan: Plan) -> None:
    run = plan.run(plan.experiment.arms[0], 0, 1e-3)
    file = beside(run.folder, ".greedy.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"key": "another", "accuracy": 0.5}))
    assert read_greedy(run) is None
    file.write_text(json.dumps({"key": run.key, "accuracy": 0.5}))
    assert read_greedy(run) == 0.5


def test_models_are_graded_by_domain_and_only_once(plan: Plan) -> None:
    with served(plan.cast, plan.experiment.served, plan.folder) as addresses:
        lines: list[str] = []
        online = Plan(plan.experiment, plan.form, plan.root, plan.cast, addresses)
        levels = grade_models(online, lines.append)
    assert len(lines) == 4  # two models, two seeds
    again: list[str] = []
    assert grade_models(plan, again.append) == levels and not again
    assert all(isinstance(level, Level) for found in levels.values() for level in found.values())
    data = json.loads((plan.folder / "levels" / "base-0.json").read_text())
    assert {name: part["prompts"] for name, part in data["sampled"]["domains"].items()} == {
        "addition": 12,
        "subtraction": 12,
    }
