"""The experiment of docs/lab.md loads, and its arms are valid recipes."""

import re
from pathlib import Path

import pytest

from opd.config import parse_settings
from opd_lab.experiments import load_experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_documented_experiment_is_one(tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(blocks("lab.md", "python")[0])
    (tmp_path / "vowels.yaml").write_text(blocks("tiny.md", "yaml")[0])
    (tmp_path / "vowels.py").write_text(blocks("tiny.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = load_experiment("mine.py")
    assert len(experiment.replicates) == 6
    summary = read_summary(world)
    assert summary is not None
    plan = ExperimentPlan(experiment, "quick", tmp_path, {0: WorldModels(summary, "quick")}, ("127.0.0.1:1",))
    for arm in experiment.arms:
        data = plan.recipe(arm, plan.replicates[0], 1e-3)
        build_plugins(parse_settings(Recipe, {"run": str(tmp_path / "run"), **data}))
