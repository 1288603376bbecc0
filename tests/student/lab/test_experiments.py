"""Every declared experiment is sound, and one runs in its short form from end to end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.lab.experiment import Arm, Claim, Experiment, Fires
from student.lab.experiments import NAMES, load_experiment
from student.lab.experiments.common import QUICK, recipe
from student.lab.plan import Plan
from student.lab.report import write_report
from student.lab.runner import run_experiment
from student.lab.tiny.summary import read_summary
from student.lab.world import Cast
from student.plugins import build_plugins
from student.recipe import Recipe


@pytest.fixture
def cast(world: Path) -> Cast:
    summary = read_summary(world)
    assert summary is not None
    return Cast(summary, "quick")


@pytest.fixture
def small() -> Experiment:
    return Experiment(
        name="small",
        letter="z",
        title="small",
        question="?",
        tasks=("addition",),
        recipe=recipe(steps=4, rows=4, length=8, objective={"name": "opd", "payload": "hidden"}),
        served=("large",),
        evaluated=("large",),
        arms=(
            Arm("plain", "plain", {}, (1e-3, 3e-3)),
            Arm(
                "short",
                "short",
                {
                    "objective.0.aggregation": "constant",
                    "methods": [{"name": "first_n", "tokens": 3}],
                },
                same_rate_as="plain",
                fires=(Fires("window", "<", 8.0),),
            ),
        ),
        claims=(Claim("short is cheaper", "short", "plain", "flops_to", "less"),),
        quick={**QUICK, "rollout.prompts_per_step": 4, "eval.prompts": 8},
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["full", "quick"])
def test_every_arm_is_a_valid_recipe(name: str, form: str, cast: Cast, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    plan = Plan(experiment, form, tmp_path, cast, ("127.0.0.1:1",)) if form == "quick" else None
    names = [arm.name for arm in experiment.arms]
    assert len(set(names)) == len(names) and len(experiment.seeds) >= 3
    for claim in experiment.claims:
        assert claim.arm in names
        assert claim.rival in names or claim.rival.removeprefix("model:") in experiment.evaluated
    if plan is None:
        # The full form needs the large world only for its folders: any cast will do for the recipe.
        plan = Plan(experiment, "full", tmp_path, _FullCast(cast.world, "full"), ("127.0.0.1:1",))
    for arm in experiment.arms:
        (tmp_path / form / name).mkdir(parents=True, exist_ok=True)
        job = parse_settings(Recipe, {"run": str(tmp_path / "run"), **plan.recipe(arm, 0, 1e-3)})
        build_plugins(job)
        assert arm.same_rate_as is None or arm.same_rate_as in names


class _FullCast(Cast):
    """Gives every part to the test world's teacher."""

    def model(self, name: str):  # type: ignore[no-untyped-def]
        return self.world.models["teacher"]


@pytest.mark.slow
def test_an_experiment_runs_resumes_and_is_reported(
    small: Experiment, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    first = run_experiment(small, cast, tmp_path, form="quick", jobs=1, say=lines.append)
    assert first["finished_runs"] == first["planned_runs"] == 4
    arms = {arm["name"]: arm for arm in first["arms"]}
    assert set(arms["plain"]["swept"]) == {"0.001", "0.003"}
    assert arms["short"]["rate"] == arms["plain"]["rate"]
    short, plain = (arms[name]["seeds"][0]["totals"]["cost/train/sampled_tokens"] for name in ("short", "plain"))
    assert 0 < short < plain
    assert all(seed["fired"] for seed in arms["short"]["seeds"])
    assert len([line for line in lines if "runs left" in line]) == 2 + 4

    folder = tmp_path / "quick" / "small"
    (folder / "short" / "seed-1" / "summary.json").unlink()
    again: list[str] = []
    second = run_experiment(small, cast, tmp_path, form="quick", jobs=1, say=again.append)
    assert [line.split(":")[0] for line in again if "runs left" in line] == [str(folder / "short" / "seed-1")]
    for one, two in zip(first["arms"], second["arms"], strict=True):
        assert [s["curve"] for s in one["seeds"]] == [s["curve"] for s in two["seeds"]]

    monkeypatch.setattr("student.lab.report.NAMES", ("small",))
    monkeypatch.setattr("student.lab.report.load_experiment", lambda name: small)
    monkeypatch.setattr("student.lab.report.open_world", lambda root, form: cast)
    page, data, plot = write_report(tmp_path, tmp_path / "docs", form="quick")
    assert "short is cheaper" in page.read_text() and "4 of 4 runs" in page.read_text()
    assert json.loads(data.read_text())["finished_runs"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_changed_recipes_are_trained_anew(small: Experiment, cast: Cast, tmp_path: Path) -> None:
    one = Plan(small, "quick", tmp_path, cast, ("127.0.0.1:1",)).run(small.arms[0], 0, 1e-3)
    elsewhere = Plan(small, "quick", tmp_path, cast, ("127.0.0.1:2",)).run(small.arms[0], 0, 1e-3)
    other = Plan(small, "quick", tmp_path, cast, ("127.0.0.1:1",)).run(small.arms[0], 0, 2e-3)
    assert one.key == elsewhere.key != other.key
    one.folder.mkdir(parents=True)
    (one.folder / "summary.json").write_text("{}")
    assert not one.done
    assert not one.prepare() and not one.folder.exists()


def test_a_report_of_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--root"):
        write_report(tmp_path / "root", tmp_path / "docs", form="quick")
    assert not list(tmp_path.iterdir())


def test_an_unknown_experiment_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="estimators"):
        load_experiment("nothing")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
