"""The teachers' part of a plan: who is asked, how long it takes, whether it delays the step, what the weights take."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

import opd.cli
from opd.config import parse_settings
from opd.errors import ConfigError
from opd.wire.types import PayloadSpec, ScoreItem
from student.job.plugins import build_plugins
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe
from student.sizing.hardware import GIB, REACHED, TABLE, USABLE, Hardware
from student.sizing.plan import describe, shape_of
from student.sizing.shape import ModelShape
from student.sizing.teachers import Ask, Fleet, asks_of, fleet_of, seconds_of
from student.sizing.times import Times, times_of
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

COUNTS = Hardware("a GPU that shows operations as seconds", 1e12, 1 / REACHED, 1e30, 0.0)
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of 1.7 M parameters."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=128, intermediate_size=384, num_hidden_layers=3, vocab_size=4096, **SHAPE)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """A job of 8 rows of at most 64 tokens after at most 64, on top-k of a served teacher, with changes by group."""

    def make(**changes: Any) -> Recipe:
        data: dict[str, Any] = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(model)},
            "teachers": {"endpoints": ["localhost:1"]},
            "prompts": {"task": "addition"},
            "objective": [{"name": "opd", "payload": "topk", "k": 8}],
            "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 64, "prompts_per_step": 8},
            "train": {"threads": 1, "mixed_precision": "no"},
        }
        for group, value in changes.items():
            data[group] = {**data.get(group, {}), **value} if isinstance(value, dict) else value
        return parse_settings(Recipe, data)

    return make


def test_planned_operations_are_those_that_the_engine_carries_out(model: Path) -> None:
    spec = PayloadSpec.hidden()
    draw = np.random.default_rng(0)
    items = [ScoreItem(draw.integers(0, 260, 32).astype(np.uint32), 12) for _ in range(4)]
    engine = TransformersEngine(str(model), dtype="f32", device="cpu")
    engine.score([EngineItem(item, spec) for item in items])
    with FlopCounterMode(display=False) as counted:
        engine.score([EngineItem(item, spec) for item in items])
    shape = ModelShape(ModelSettings(path=str(model)))
    planned, bound = seconds_of([Ask("", spec, 1.0)], shape, 4 * 32, 4 * 20, COUNTS)
    assert bound == "arithmetic"
    assert planned == pytest.approx(counted.get_total_flops(), rel=0.1), "what is left out is attention"
    # The counter does not see products into memory that is there already, as the engine makes them with the head.
    headed, _ = seconds_of([Ask("", PayloadSpec.topk(8), 1.0)], shape, 4 * 32, 4 * 20, COUNTS)
    assert headed - planned == 2 * 4 * 20 * 4096 * 128


def test_rows_go_to_the_teachers_that_the_recipe_names(recipe: Callable[..., Recipe]) -> None:
    def shares(**teachers: Any) -> dict[str, float]:
        job = recipe(teachers=teachers)
        return {ask.model: ask.share for ask in asks_of(job, build_plugins(job).needs)}

    assert shares() == {"": 1.0} and shares(default="large") == {"large": 1.0}
    assert shares(default="large", routes={"maths": "small"}) == {"large": 0.5, "small": 0.5}
    mixed = shares(combine="divergence", default={"large": 2.0, "small": 1.0}, routes={"maths": "small"})
    assert mixed == {"large": 0.5, "small": 1.0}, "every teacher of a mixture reads the row"


def times(job: Recipe, fleet: Fleet, device: Hardware = TABLE["h100"]) -> Times:
    return times_of(job, ModelShape(job.model), build_plugins(job).needs, device, mean=32.0, ranks=1, fleet=fleet)


@pytest.mark.parametrize(
    ("precision", "device", "width"),
    [("auto", "h100", 2), ("auto", "CPU", 4), ("bf16", "CPU", 2), ("no", "h100", 4)],
)
def test_the_student_of_a_plan_has_the_precision_in_which_it_trains_on_the_device(
    precision: str, device: str, width: int, recipe: Callable[..., Recipe]
) -> None:
    of = TABLE.get(device, replace(TABLE["h100"], name="the CPU here"))
    assert shape_of(recipe(train={"mixed_precision": precision}), of).width == width


def test_devices_share_the_work_and_a_slow_teacher_bounds_the_step(recipe: Callable[..., Recipe], model: Path) -> None:
    job = recipe()
    shape = ModelShape(ModelSettings(path=str(model)))
    quick = times(job, Fleet({"": shape}, TABLE["h100"]))
    assert quick.stages["teachers"] < quick.stages["rollout"] and quick.slowest == "rollout"
    assert quick.step == pytest.approx(quick.stages["rollout"] + quick.stages["learn"]), "rows are scored as they end"
    slow = replace(TABLE["h100"], flops=1e9)
    one, four = (times(job, Fleet({"": shape}, slow, devices)) for devices in (1, 4))
    assert one.stages["teachers"] == pytest.approx(4 * four.stages["teachers"])
    assert one.slowest == "teachers" and one.bound["teachers"] == "arithmetic"
    assert one.step == pytest.approx(one.stages["teachers"] + one.stages["learn"])
    capped = [{"name": "opd", "payload": "topk", "k": 8, "importance_cap": 2.0}]
    ahead = times(recipe(train={"max_staleness": 1}, objective=capped), Fleet({"": shape}, slow))
    assert ahead.step == pytest.approx(ahead.stages["teachers"]), "the student works beside"


def test_models_in_process_take_time_of_the_student_and_no_network(recipe: Callable[..., Recipe]) -> None:
    objective = [{"name": "sft", "rows": "all"}, {"name": "reference_kl"}]
    found = times(recipe(objective=objective, teachers={"reference": "initial"}), Fleet({}, TABLE["h100"]))
    assert found.stages["in process"] > 0 and found.sent == 0 and "teachers" not in found.stages
    assert found.step == pytest.approx(sum(found.stages.values()))


@pytest.mark.parametrize(("rollout", "slowest"), [(5.0, "learn"), (8.0, "rollout")])
def test_a_rollout_beside_learning_bounds_the_step_where_it_takes_longer_than_all_of_it(
    rollout: float, slowest: str
) -> None:
    found = Times({"rollout": rollout, "learn": 4.0, "in process": 3.0}, {}, 1, 0, 0, 0, ahead=True, beside=True)
    assert found.slowest == slowest
    assert replace(found, stages={**found.stages, slowest: 0.0}).step < found.step, "a faster one shortens it"


@pytest.mark.parametrize(("teachers", "step", "slowest"), [(4.0, 6.0, "learn"), (9.0, 10.0, "teachers")])
def test_all_micro_batches_but_the_last_are_learnt_while_teachers_score_where_the_job_learns_early(
    teachers: float, step: float, slowest: str
) -> None:
    found = Times({"rollout": 2.0, "learn": 4.0, "teachers": teachers}, {}, 1, 0, 0, 0, parts=4)
    assert (found.step, found.slowest) == (step, slowest)
    assert replace(found, parts=1).step == teachers + 4.0


def test_the_plan_names_the_stage_that_bounds_a_step_and_the_devices_that_suffice(
    recipe: Callable[..., Recipe], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe().model_dump(mode="json")))
    opd.cli._add_verbs()

    def plan(*more: str) -> str:
        words = ["plan", str(tmp_path / "recipe.yaml"), "--hardware", "h100", "--mean-tokens", "32", *more]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(opd.cli.app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    unknown = plan()
    assert "scoring time unknown: describe the model with --teacher MODEL (opd plan)" in unknown
    assert "the step is bound by rollout\n" in unknown and "not counting the scoring" in unknown
    known = plan("--teacher", str(model), "--teacher-gpus", "2", "--teacher-hardware", "l40s")
    assert "teachers on 2 x NVIDIA L40S, 0.0 GiB of weights once" in known and "not known" not in known
    job, shape = recipe(), ModelShape(ModelSettings(path=str(model), dtype="bfloat16"))
    slow = replace(TABLE["h100"], flops=1e9)
    lines = "\n".join(describe(job, TABLE["h100"], mean=32.0, fleet=Fleet({"": shape}, slow, 2)))
    enough = int(re.findall(r"the step is bound by teachers; (\d+) devices of theirs would not delay it", lines)[0])
    assert times(job, Fleet({"": shape}, slow, enough)).slowest == "rollout"
    assert times(job, Fleet({"": shape}, slow, enough - 1)).stages["teachers"] > times(job, Fleet({}, slow)).rivals


def test_teachers_that_no_device_holds_are_refused_with_as_many_as_do(
    recipe: Callable[..., Recipe], model: Path, tmp_path: Path
) -> None:
    job = recipe(teachers={"default": "large", "routes": {"maths": "small"}})
    asks = asks_of(job, build_plugins(job).needs)
    tight = replace(TABLE["h100"], memory=0.0015 * GIB / USABLE, reserve=0.0)
    fleet = fleet_of([f"large={model}", f"small={model}"], tight, 1)
    with pytest.raises(ConfigError, match=r"--teacher-gpus (\d+) or more") as refused:
        fleet.check_fits(asks)
    enough = int(re.findall(r"gpus (\d+)", str(refused.value))[0])
    replace(fleet, devices=enough).check_fits(asks)
    with pytest.raises(ConfigError, match=r"'lagre'.* 'large', 'small'"):
        # Before the first line of a plan.
        next(describe(job, TABLE["h100"], fleet=fleet_of([f"lagre={model}", f"small={model}"], TABLE["h100"], 1)))
    with pytest.raises(ConfigError):
        replace(fleet, devices=enough - 1).check_fits(asks)
    assert fleet_of([f"small={model}"], tight, 1).unknown(asks) == ["large"]
    odd = tmp_path / "rate=1e-4"
    odd.symlink_to(model)
    assert fleet_of([str(odd)], tight, 1).models.keys() == {""}, "a path with = in it is no name"
    with pytest.raises(ConfigError, match=r"two models .*without a name"):
        fleet_of([str(model), str(model)], tight, 1)
