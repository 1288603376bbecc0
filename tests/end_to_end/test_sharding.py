"""`opd train` with `train.sharding: fsdp` on two ranks (torchrun, gloo) and on one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
from checkpoints import assert_close, assert_same, state_of
from peft import PeftModel
from run_records import metrics_of
from transformers import AutoModelForCausalLM
from waiting import wait_until

from student.commands.cli import train as command
from student.job.session import train
from student.run.checkpoint import find_damage, latest_checkpoint
from student.settings.recipe import Recipe

FSDP = {"sharding": "fsdp", "micro_batch_tokens": 64}


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


COMMON: dict[str, Any] = {
    # Three prompts of two samples: one rank gets more rows, and so more micro-batches, than the other.
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
    "objective": [{"name": "opd", "payload": "gather", "k": 8}, {"name": "reference_kl", "weight": 0.1}],
    "teachers": {"reference": "ema", "ema": {"decay": 0.5}},
    "methods": [{"name": "effopd", "gate": {"prompts": 3}}],
    "model": {"gradient_checkpointing": True},
    "eval": {"prompts": 3},
}


def test_two_ranks_train_a_sharded_student_like_a_whole_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    whole, sharded = (
        make_recipe(run=str(tmp_path / name), **COMMON, train={**FSDP, "sharding": name, "steps": 2})
        for name in ("none", "fsdp")
    )
    two_ranks(whole, sharded)
    assert_close(state_of(at(whole.run, 2)), state_of(at(sharded.run, 2)))
    assert find_damage(at(sharded.run, 2)) is None


@pytest.mark.slow
def test_two_ranks_train_save_and_resume_a_sharded_student_and_one_goes_on_alone(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    whole = make_recipe(run=str(tmp_path / "whole"), **COMMON, train={"micro_batch_tokens": 64})
    calm = make_recipe(run=str(tmp_path / "calm"), **COMMON, train=FSDP)
    cut = [make_recipe(run=str(tmp_path / "cut"), **COMMON, train={**FSDP, "steps": steps}) for steps in (2, 4)]
    lora = {**COMMON, "methods": [], "model": {"lora": {"rank": 4, "alpha": 8}}, "teachers": {"reference": "initial"}}
    adapters = [
        make_recipe(run=str(tmp_path / name), **lora, train={**FSDP, "sharding": name.partition("-")[0], "steps": 2})
        for name in ("none-lora", "fsdp-lora")
    ]
    two_ranks(whole, calm, *cut, *adapters)
    assert_close(state_of(at(whole.run, 4)), state_of(at(calm.run, 4)))
    assert_same(state_of(at(cut[1].run, 4)), state_of(at(calm.run, 4)))
    shards = list((at(calm.run, 4) / "trainer").glob("*-shards/*"))
    assert {path.parent.name for path in shards} == {"learner-shards", "local-shards", "loop-shards"} and len(
        shards
    ) == 6
    assert find_damage(at(calm.run, 4)) is None
    assert_close(*(state_of(at(recipe.run, 2)) for recipe in adapters))
    base = AutoModelForCausalLM.from_pretrained(calm.model.path)
    PeftModel.from_pretrained(base, at(adapters[1].run, 2) / "model")
    lines = [metrics_of(run) for run in (whole.run, calm.run)]
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss/opd", "loss/reference_kl", "ema_distance", "grad_norm", "response_tokens"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name

    # One process goes on alone, sharded and whole.
    for sharding in ("fsdp", "none"):
        alone = make_recipe(run=str(tmp_path / sharding), **COMMON, train={**FSDP, "sharding": sharding})
        shutil.copytree(calm.run, alone.run, ignore=shutil.ignore_patterns("step-000003", "step-000004"))
        train(alone, resume=True)
        assert_close(state_of(at(alone.run, 4)), state_of(at(calm.run, 4)))


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_name_and_when_it_is_started_again_it_goes_on(
    make_recipe: Callable[..., Recipe],
    launch: Callable[..., forked.Program],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick: dict[str, Any] = {"rollout": {"prompts_per_step": 2, "max_new_tokens": 4}, "eval": {"prompts": 0}}
    recipe = make_recipe(**quick, train={**FSDP, "steps": 100_000})
    process = launch(recipe)
    wait_until(lambda: at(recipe.run, 2).exists() or process.poll() is not None, 600)
    (second,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    second.kill()
    _, errors = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "rank 1 ended: it reported no error, so it was killed" in errors
    assert json.loads((recipe.run / "ending.json").read_text())["error"].startswith("rank 1 ended")
    checkpoint = latest_checkpoint(recipe.run / "checkpoints")
    assert checkpoint is not None
    done = int(checkpoint.name[5:])
    # torchrun --max-restarts gives the same command again.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    command(tmp_path / "0-run.yaml", [f"train.steps={done + 1}"])
    assert json.loads((recipe.run / "summary.json").read_text())["steps"] == done + 1
