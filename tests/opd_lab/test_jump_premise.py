"""EffOPD's premises: a training that is continued in the direction that it began with, and the line to the teacher."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd_lab.experiments import load_experiment
from opd_lab.jump_premise import early, line
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.summary import WorldSummary, read_summary
from opd_lab.world import WorldModels


@pytest.fixture
def summary(world: Path) -> WorldSummary:
    found = read_summary(world)
    assert found is not None
    return found


def _plan(summary: WorldSummary, root: Path) -> ExperimentPlan:
    return ExperimentPlan(load_experiment("effopd"), "quick", root, {0: WorldModels(summary, "quick")})


@pytest.mark.usefixtures("forked_servers")
def test_the_first_tenth_is_moved_on_as_far_as_the_end(summary: WorldSummary, tmp_path: Path) -> None:
    plan = _plan(summary, tmp_path)
    found = early(plan, 0, arm="opd_low", least=float("-inf"))
    factor = re.search(r"moved on (\d+\.\d) times as far", found.numbers)
    # A step of four, the first of them at a rising rate: the end is farther away than the beginning.
    assert factor and float(factor[1]) > 1.0
    assert "cosine of the two displacements 0." in found.numbers
    kept = sorted(path.name for path in tmp_path.rglob("step-*"))
    assert [int(name.removeprefix("step-")) for name in kept] == [2, 4], "the short form keeps every second step"


def test_the_line_ends_in_the_teacher_and_leads_beyond(summary: WorldSummary, tmp_path: Path) -> None:
    student = summary.models["student"]
    goal = tmp_path / "goal"
    shutil.copytree(student.path, goal)
    weights = load_file(goal / "model.safetensors")
    # From the student to nothing at all: at 1 every weight is 0, and no answer can be right.
    save_file({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, goal / "model.safetensors")
    models = {**summary.models, "teacher": replace(student, path=goal)}
    plan = _plan(replace(summary, models=models), tmp_path)
    found = line(plan, 0, teacher="teacher", places=(0.0, 1.0, 2.0), loss=0.0)
    assert re.match(r"accuracy at 0: \d.*, 1: 0\.000, 2: ", found.numbers)
    assert found.present, "from nothing there is nothing to lose"
    assert "the two are 100.0% of a length apart" in found.numbers


def test_models_of_two_shapes_have_no_line(summary: WorldSummary, tmp_path: Path) -> None:
    found = line(_plan(summary, tmp_path), 0, teacher="teacher", places=(1.0, 1.5), loss=1.0)
    assert not found.present and "another shape" in found.numbers
