"""Every declared experiment is sound, and one runs in its short form from end to end."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd_lab.curve import Sizes
from opd_lab.evaluate import _model_file
from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise, Replicate
from opd_lab.experiments import NAMES, check, load_experiment
from opd_lab.experiments.common import QUICK, recipe
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured, _file
from opd_lab.report import write_report
from opd_lab.results import sizes
from opd_lab.runner import _work, run_experiment
from opd_lab.tiny.presets import world_plan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe


@pytest.fixture
def models(world: Path) -> WorldModels:
    summary = read_summary(world)
    assert summary is not None
    return WorldModels(summary, "quick")


@pytest.fixture
def small() -> Experiment:
    return Experiment(
        name="small",
        letter="z",
        title="small",
        question="?",
        tasks=("addition",),
        recipe=recipe(steps=4, rows=4, length=8, objective={"name": "opd", "payload": "hidden"}),
        served=("teacher",),
        evaluated=("teacher",),
        answers_of="teacher",
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
            Arm(
                "imitates",
                "imitates",
                {
                    "objective": [{"name": "sft"}],
                    "methods": [{"name": "expert_rows", "share": 1.0, "source": "file"}],
                    "methods.0.file": "{answers:greedy}",
                },
                same_rate_as="plain",
            ),
        ),
        claims=(
            Claim("short is cheaper", "short", "plain", "flops_to", "less", premise="weather"),
            Claim("short is shorter", "short", "value:8", "metric/response_length", "less"),
        ),
        premises=(Premise("weather", "it rains", "test_premise_module:measure", {"wet": False}),),
        decision="four steps",
        changes=("nothing was changed",),
        quick={**QUICK, "rollout.prompts_per_step": 4, "eval.prompts": 8},
    )


@pytest.fixture
def rain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the premise of `small` measurable; gives the worlds that were measured."""
    import sys
    from types import ModuleType

    asked: list[int] = []

    def measure(plan: ExperimentPlan, world: int, *, wet: bool) -> Measured:
        asked.append(world)
        return Measured(wet, "dry")

    module = ModuleType("test_premise_module")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "test_premise_module", module)
    return asked


class _FullModels(WorldModels):
    """Gives every part to the test world's teacher."""

    def model(self, name: str):  # type: ignore[no-untyped-def]
        return self.world.models["teacher"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["full", "quick"])
def test_every_arm_is_a_valid_recipe(name: str, form: str, models: WorldModels, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    # The full form needs its worlds only for their folders: any models will do for the recipe.
    one = models if form == "quick" else _FullModels(models.world, "full")
    plan = ExperimentPlan(experiment, form, tmp_path, dict.fromkeys(experiment.worlds, one), ("127.0.0.1:1",))
    names = [arm.name for arm in experiment.arms]
    assert len(set(names)) == len(names) and experiment.decision
    world = world_plan(str(experiment.world_file))
    models = {*experiment.served, *experiment.routes.values(), *experiment.evaluated} - {"teachers"}
    assert models | {experiment.student} <= set(world.models) and set(experiment.tasks) <= set(world.tasks)
    for arm in experiment.arms:
        data = plan.recipe(arm, plan.replicates[0], 1e-3)
        build_plugins(parse_settings(Recipe, {"run": str(tmp_path / "run"), **data}))
        assert arm.same_rate_as is None or arm.same_rate_as in names


def test_run_seeds_and_world_seeds_that_meet_are_refused(small: Experiment) -> None:
    assert check(small) is small
    with pytest.raises(ConfigError, match="seed 1 is both"):
        check(replace(small, seeds=(1, 10, 11)))
    # The second model of world 2 was trained on the prompts of seed 2001.
    with pytest.raises(ConfigError, match="seed 2001 is both"):
        check(replace(small, worlds=(2, 3), seeds=(10, 11, 2001), world="sums"))
    with pytest.raises(ConfigError, match="too few"):
        check(replace(small, seeds=(10, 11)))
    with pytest.raises(ConfigError, match="unknown premise"):
        check(replace(small, premises=()))


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.slow
def test_an_experiment_runs_resumes_elsewhere_and_is_reported(
    small: Experiment, models: WorldModels, rain: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    plan = ExperimentPlan(small, "quick", tmp_path / "here", {0: models})
    first = run_experiment(plan, jobs=1, log=lines.append)
    assert rain == [0]
    assert first["finished_runs"] == first["planned_runs"] == 6
    arms = {arm["name"]: arm for arm in first["arms"]}
    assert set(arms["plain"]["swept"]) == {"0.001", "0.003"}
    assert arms["short"]["rate"] == arms["plain"]["rate"]
    short, plain = (arms[name]["seeds"][0]["totals"]["cost/train/sampled_tokens"] for name in ("short", "plain"))
    assert 0 < short < plain
    assert all(seed["fired"] for seed in arms["short"]["seeds"])
    assert all({"greedy", "pass8", "pass64"} <= set(seed["level"]) for seed in arms["plain"]["seeds"])
    assert arms["imitates"]["seeds"][0]["drawn"] > 0
    assert [claim["outcome"] for claim in first["claims"]] == ["premise absent", "holds"]
    assert all(seed["metrics"]["response_length"] <= 3.0 for seed in arms["short"]["seeds"])
    assert len([line for line in lines if line.endswith(" left")]) == 2 + 6 + 2  # sweep, runs, levels of the teacher

    # The folder moves, and a summary is lost: one run is done again, nothing else.
    shutil.move(tmp_path / "here", tmp_path / "there")
    (gone,) = (tmp_path / "there" / "quick" / "small" / "world-0" / "short").glob("seed-11-*/summary.json")
    gone.unlink()
    again: list[str] = []
    moved = ExperimentPlan(small, "quick", tmp_path / "there", {0: models})
    second = run_experiment(moved, jobs=1, log=again.append)
    assert [line for line in again if line.endswith(" left")] and rain == [0]
    assert len([line for line in again if line.endswith(" left")]) == 1 and "short/seed-11" in "".join(again)
    for one, two in zip(first["arms"], second["arms"], strict=True):
        assert [s["curve"] for s in one["seeds"]] == [s["curve"] for s in two["seeds"]]

    monkeypatch.setattr("opd_lab.report.load_experiment", lambda name: small)
    monkeypatch.setattr("opd_lab.report.find_plan", lambda *_: moved)
    page, data, plot = write_report(tmp_path / "there", tmp_path / "docs", form="quick", names=["small"])
    text = page.read_text()
    facts = ("short is cheaper", "6 of 6 runs", "it rains", "absent", "four steps", "nothing was changed")
    for part in (*facts, "| arm | `response_length` |"):
        assert part in text
    assert json.loads(data.read_text())["finished_runs"] == 6
    assert plot.read_bytes().startswith(b"\x89PNG")

    # A lab elsewhere that has only begun leaves what this one found.
    begun = ExperimentPlan(small, "quick", tmp_path / "elsewhere", {0: models})
    (tmp_path / "elsewhere" / "quick" / "small").mkdir(parents=True)
    monkeypatch.setattr("opd_lab.report.find_plan", lambda *_: begun)
    stored = data.read_text()
    write_report(begun.root, tmp_path / "docs", form="quick", names=["small"])
    assert page.read_text() == text and data.read_text() == stored  # to the last digit


def test_the_page_of_results_is_what_its_files_say(
    small: Experiment, models: WorldModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    shutil.copytree(docs / "results", tmp_path / "docs" / "results")
    (tmp_path / "full" / "effopd").mkdir(parents=True)
    begun = ExperimentPlan(small, "full", tmp_path, {0: models, 1: models})
    monkeypatch.setattr("opd_lab.report.find_plan", lambda *_: begun)
    (page,) = write_report(tmp_path, tmp_path / "docs", form="full", names=["effopd"])
    text = page.read_text()
    assert text == (docs / "results.md").read_text()
    for data in (docs / "results").glob("*.json"):
        assert (tmp_path / "docs" / "results" / data.name).read_text() == data.read_text()
    # An arm whose rate is another's, beside the arm that swept it.
    assert "| OPD, a tenth of the best rate | 0.0001 † |" in text and "| OPD, swept rate | 0.003 * |" in text
    outcomes = re.findall(r"\| ([a-z ]+) \| (?:difference|ratio) ", text)
    decided = sum(outcome in ("holds", "does not hold") for outcome in outcomes)
    assert f"{len(outcomes)} on this page that have one, {decided} are decided" in text


def test_a_report_of_one_experiment_keeps_what_is_known_of_the_others(
    small: Experiment, models: WorldModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(__file__).parents[2] / "docs" / "results", tmp_path / "docs" / "results")
    (tmp_path / "docs" / "results" / "effopd.json").unlink(missing_ok=True)  # of which nothing is known
    (tmp_path / "full" / "effopd").mkdir(parents=True)
    begun = ExperimentPlan(small, "full", tmp_path, {0: models, 1: models})
    monkeypatch.setattr("opd_lab.report.find_plan", lambda *_: begun)
    (page,) = write_report(tmp_path, tmp_path / "docs", form="full", names=["effopd"])
    text = page.read_text()
    assert "## (f) Estimators of the reverse KL" in text and "(d1)" in text
    assert re.search(r"EffOPD.*: 0 of \d+ runs", text)


def test_a_runs_folder_follows_its_recipe_and_world_and_not_its_place(
    small: Experiment, models: WorldModels, tmp_path: Path
) -> None:
    def at(root: str, rate: float = 1e-3, port: int = 1, key: str | None = None) -> str:
        world = models if key is None else WorldModels(replace(models.world, key=key), "quick")
        # The world lies below the root, as in the lab.
        moved = {name: replace(m, path=tmp_path / root / "world" / name) for name, m in world.world.models.items()}
        plan = ExperimentPlan(
            small,
            "quick",
            tmp_path / root,
            {0: WorldModels(replace(world.world, models=moved), "quick")},
            (f"127.0.0.1:{port}",),
        )
        return plan.run(small.arm("imitates"), Replicate(0, 10), rate).key

    assert at("a") == at("b") == at("a", port=2) == at("jörg")
    assert len({at("a"), at("a", rate=2e-3), at("a", key="of another version")}) == 3


def test_answers_premises_and_levels_belong_to_the_settings_that_they_came_from(
    small: Experiment, models: WorldModels, tmp_path: Path
) -> None:
    def files(experiment: Experiment) -> tuple[Path, Path, Path]:
        plan = ExperimentPlan(experiment, "full", tmp_path, {0: models, 1: models})
        level = _model_file(plan, "teacher", plan.replicates[0])
        return plan.answers(0, "greedy"), _file(plan, experiment.premises[0], 0), level

    answers, premise, level = files(small)
    assert files(small) == (answers, premise, level)
    longer = files(replace(small, recipe={**small.recipe, "rollout": {**small.recipe["rollout"], "max_new_tokens": 9}}))
    assert not {answers, premise, level} & {*longer}
    (one,) = small.premises
    assert files(replace(small, premises=(replace(one, options={"wet": True}),)))[1] != premise
    assert files(replace(small, seeds=(10, 11, 13)))[0] != answers, "their training prompts are others"


def test_flops_are_counted_at_the_size_of_the_models_that_an_arm_names(
    small: Experiment, models: WorldModels, tmp_path: Path
) -> None:
    plan = ExperimentPlan(small, "full", tmp_path, {0: models})
    student, teacher = (models.world.models[name].parameters for name in ("student", "teacher"))
    full = ExperimentPlan(replace(small, student="student"), "full", tmp_path, {0: WorldModels(models.world, "full")})
    assert sizes(full) == Sizes(student, teacher, student)
    padded = models.world.models["padded"].parameters
    other = Arm("other", "", {"teachers.reference": "teacher", "teachers.default": "padded"}, student="teacher")
    assert sizes(full, other) == Sizes(teacher, padded, teacher)
    assert sizes(plan).student == student


def test_a_run_that_left_nothing_to_go_on_from_is_named_and_begins_again(
    small: Experiment, models: WorldModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ExperimentPlan(small, "quick", tmp_path, {0: models}, ("127.0.0.1:1",)).run(
        small.arms[0], Replicate(0, 10), 1e-3
    )
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.yaml").write_text("half")
    other = run.folder.with_name("seed-10-00000000")
    other.mkdir()
    lines: list[str] = []
    monkeypatch.setattr("student.job.session.train", lambda *_, **__: {})
    monkeypatch.setattr("opd_lab.runner._outcome", lambda task: "done")
    _work([run], 1, lines.append)
    assert "starts from the beginning" in lines[0] and run.name in lines[0]
    assert other.is_dir() and not run.folder.exists()


def test_a_damaged_summary_is_named(small: Experiment, models: WorldModels, tmp_path: Path) -> None:
    run = ExperimentPlan(small, "quick", tmp_path, {0: models}).run(small.arms[0], Replicate(0, 10), 1e-3)
    run.folder.mkdir(parents=True)
    (run.folder / "summary.json").write_text('{"before": ')
    with pytest.raises(DataError, match=r"summary\.json is damaged"):
        run.summary()


def test_a_report_of_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--root"):
        write_report(tmp_path / "root", tmp_path / "docs", form="quick")
    assert not list(tmp_path.iterdir())


def test_an_unknown_experiment_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="estimators"):
        load_experiment("nothing")
    with pytest.raises(ConfigError, match="does not exist"):
        load_experiment(str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").write_text("EXPERIMENT = 3")
    with pytest.raises(ConfigError, match="has no EXPERIMENT"):
        load_experiment(str(tmp_path / "mine.py"))
