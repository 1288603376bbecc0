"""The recipes of the first hour: one class of machines runs here from end to end at a reduced shape, all fit theirs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_records import metrics_of
from typer.testing import CliRunner

import opd.cli
from opd.config import load_settings
from opd_lab.tiny.random_models import config_of, count_parameters, random_shape
from student.job.plugins import build_plugins
from student.report.expected import read_expected
from student.settings.recipe import Recipe
from student.sizing.hardware import GIB, TABLE
from student.sizing.memory import check_fits, memory_of
from student.sizing.shape import ModelShape

ROOT = Path(__file__).parents[2]
CLASSES = {
    "random": ("qwen2.5-0.5b", "qwen2.5-1.5b", "rtx4090"),
    "24gb": ("qwen2.5-0.5b", "qwen2.5-1.5b", "rtx4090"),
    "80gb": ("qwen3-1.7b", "qwen3-8b", "h100"),
}
"""Class to the shapes of student and teacher, and the least device."""
SERVER = 3 * GIB
"""Left to the teacher's process beside its weights; not measured on a GPU."""


def path_of(name: str, kind: str) -> Path:
    return ROOT / "examples" / "first-hour" / name / kind


def opd_(*words: str | Path, code: int = 0) -> str:
    """What an `opd` command prints; its exit code must be `code`."""
    opd.cli._add_verbs()
    result = CliRunner(env={"COLUMNS": "160"}).invoke(opd.cli.app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory, serve: Any) -> tuple[Path, Callable[..., list[str]]]:
    """Both runs of the random class at a fourteenth of the shape: their folder, and a recipe's overrides."""
    folder = tmp_path_factory.mktemp("hour")
    models, answers = folder / "models", folder / "answers.jsonl"
    sizes = ["--scale", "0.07", "--vocabulary", "4096", "--prompts", "64", "--prompt-tokens", "16"]
    opd_("tiny", "random", models, *sizes)
    server = serve("--model", f"teacher={models / 'teacher'}")

    def changes(kind: str) -> list[str]:
        found = [f"run={folder / kind}", f"model.path={models / 'student'}", f"prompts.file={models / 'prompts.jsonl'}"]
        found += ["rollout.prompts_per_step=4", "rollout.max_new_tokens=12", "rollout.max_prompt_tokens=16"]
        found += ["train.threads=1", "train.mixed_precision='no'", "train.micro_batch_tokens=256"]
        if kind == "distil":
            return [*found, f"teachers.endpoints=[{server.address}]", "train.steps=4"]
        return [*found, f"methods.0.file={answers}", f"methods.1.run={folder / 'distil'}", "train.steps=8"]

    opd_("train", path_of("random", "distil.yaml"), *changes("distil"))
    sft = path_of("random", "sft.yaml")
    opd_("answers", sft, *changes("sft"), "--model", models / "teacher", "--out", answers)
    opd_("train", sft, *changes("sft"))
    return folder, changes


def test_the_random_class_runs_from_end_to_end_within_the_shipped_traffic(hour: Any, tmp_path: Path) -> None:
    folder, _ = hour
    shipped = read_expected(path_of("random", "expected.json"))
    judged = {name: band for name, band in shipped.expected.items() if band.bounds != (None, None)}
    # Tokens of all steps are those of the whole recipe; bytes per token depend on k alone.
    assert judged.keys() == {"payload_bytes_per_token", "response_tokens"}
    mine = tmp_path / "expected.json"
    entry = {"payload_bytes_per_token": judged["payload_bytes_per_token"].model_dump()}
    mine.write_text(json.dumps({"about": "here", "expected": entry}))
    assert "within" in opd_("compare", folder / "distil", mine)


def test_compare_passes_in_the_band_of_the_run_itself_and_exits_1_outside(hour: Any, tmp_path: Path) -> None:
    folder, _ = hour
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    opd_("compare", folder / "distil", "--write", own)
    assert "within" in opd_("compare", folder / "distil", own)
    data = json.loads(own.read_text())
    data["expected"]["response_tokens"]["value"] *= 2
    other.write_text(json.dumps(data))
    assert "below" in opd_("compare", folder / "distil", other, code=1)


def test_the_rival_learns_from_the_teacher_s_answers_for_as_many_tokens(hour: Any) -> None:
    folder, _ = hour
    table = opd_("compare", folder / "sft", folder / "distil")
    summaries = [json.loads((folder / kind / "summary.json").read_text()) for kind in ("sft", "distil")]
    mine, theirs = (summary["response_tokens"] for summary in summaries)
    assert theirs <= mine < theirs + 4 * 13, "at most a step more"
    assert "response_tokens" in table and summaries[0]["steps"] < 8
    lines = metrics_of(folder / "sft")
    assert all(line["expert_share"] == 1 for line in lines) and lines[-1]["token_budget_spent"] >= 1


@pytest.mark.parametrize("kind", ["distil", "sft"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_recipe_passes_a_dry_run_and_is_paired_with_its_rival(name: str, kind: str, tmp_path: Path) -> None:
    assert "needs: " in opd_(
        "train", path_of(name, f"{kind}.yaml"), f"run={tmp_path / 'run'}", "--dry-run", "--offline"
    )
    distil, sft = (yaml.safe_load(path_of(name, f"{file}.yaml").read_text()) for file in ("distil", "sft"))
    for group in ("model", "prompts", "rollout", "eval", "seed"):
        assert distil[group] == sft[group], group
    assert {key: value for key, value in distil["train"].items() if key != "steps"} == {
        key: value for key, value in sft["train"].items() if key != "steps"
    }
    assert sft["train"]["steps"] > distil["train"]["steps"]
    assert [method["name"] for method in sft["methods"]] == ["expert_rows", "token_budget"]
    assert sft["methods"][1]["run"] == distil["run"]


@pytest.mark.parametrize("name", CLASSES)
def test_expected_figures_are_of_the_recipe_and_every_one_has_a_source(name: str) -> None:
    expected = read_expected(path_of(name, "expected.json")).expected
    recipe = yaml.safe_load(path_of(name, "distil.yaml").read_text())
    most = recipe["train"]["steps"] * recipe["rollout"]["prompts_per_step"] * recipe["rollout"]["max_new_tokens"]
    low, high = expected["response_tokens"].bounds
    assert low is not None and high is not None and low <= most <= high * 1.0001
    steps = {int(figure.partition("@")[2]) for figure in expected if "@" in figure}
    every = recipe["eval"].get("every", 0)
    assert steps <= {0, *range(every, recipe["train"]["steps"] + 1, every or 1)}
    assert all(band.bounds == (None, None) for band in expected.values() if band.source == "unknown")
    assert {"tokens_per_second", "step_seconds"} <= expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distil", "sft"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_recipe_fits_its_device_beside_the_teacher(name: str, kind: str, tmp_path: Path) -> None:
    student, teacher, device = CLASSES[name]
    config_of(random_shape(student)).save_pretrained(tmp_path)
    recipe = load_settings(Recipe, path_of(name, f"{kind}.yaml"), [f"model.path={tmp_path}"])
    gpu = TABLE[device]
    needs = build_plugins(recipe).needs
    memory = memory_of(recipe, ModelShape(recipe.model, torch.bfloat16), needs, gpu, gpu=True)
    check_fits(memory, gpu, recipe)
    weights = 2 * count_parameters(random_shape(teacher))
    assert memory.peak + memory.reserve + weights + SERVER < 0.92 * gpu.memory, f"{memory.peak / GIB:.1f} GiB"
