"""Whole trainings that sample with vLLM: equal to those with engine transformers, and beside a vLLM teacher."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from run_records import metrics_of

from opd.errors import RolloutEngineError
from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]

VLLM = {"engine": {"name": "vllm"}}
GATE = {"kind": "reverse_kl", "prompts": 8, "gain": 0.0, "length_tolerance": 9, "truncation_tolerance": 1}
EFFOPD: dict[str, Any] = {"methods": [{"name": "effopd", "tries": 3, "gate": GATE}], "eval": {"prompts": 8}}


def test_a_resumed_run_with_vllm_and_jumps_ends_at_the_weights_of_one_without_vllm(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    plain = train(make_recipe(run=str(tmp_path / "plain"), **EFFOPD))
    run = tmp_path / "vllm"
    train(make_recipe(run=str(run), **EFFOPD, rollout=VLLM, train={"steps": 2}))
    resumed = train(make_recipe(run=str(run), **EFFOPD, rollout=VLLM), resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(plain["checkpoint"]))
    assert resumed["after"] == plain["after"]
    for step in metrics_of(run):
        assert step["mismatch/log_ratio"] < 1e-4 and abs(step["mismatch/kl"]) < 1e-6
        assert step["engine/syncs"] >= 1 and step["engine/sync_seconds"] > 0 and "engine/restarts" not in step


def test_vllm_samples_beside_learning_with_the_weights_of_the_step_before(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    exact: dict[str, Any] = {"objective": [{"name": "opd", "payload": "hidden"}], "train": {"max_staleness": 1}}
    plain = train(make_recipe(run=str(tmp_path / "plain"), **exact))
    beside = train(make_recipe(run=str(tmp_path / "vllm"), rollout=VLLM, **exact))
    assert hashes(Path(beside["checkpoint"])) == hashes(Path(plain["checkpoint"]))
    assert [step["staleness"] for step in metrics_of(tmp_path / "vllm")] == [0, 1, 1, 1]


def test_student_and_teacher_may_both_run_vllm(
    make_recipe: Callable[..., Recipe], world: Path, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    teacher = serve("--engine", "vllm", "--model", f"teacher={world / 'teacher'}")
    run = tmp_path / "run"
    lora = {"path": str(world / "student"), "lora": {"rank": 8, "alpha": 16}}
    recipe = make_recipe(
        run=str(run),
        model=lora,
        teachers={"endpoints": [teacher.address]},
        rollout={**VLLM, "prompts_per_step": 16},
        train={"steps": 12, "learning_rate": 5e-3, "checkpoint_every": 0},
        eval={"prompts": 16},
    )
    summary = train(recipe)
    steps = metrics_of(run)
    assert len(steps) == 12 and all(step["mismatch/max_log_ratio"] < 1e-3 for step in steps)
    assert summary["after"]["reverse_kl"] < 0.8 * summary["before"]["reverse_kl"]


def test_two_ranks_whole_or_sharded_with_an_engine_each_train_like_two_without(
    make_recipe: Callable[..., Recipe],
    two_ranks: Callable[..., None],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    common: dict[str, Any] = {"train": {"steps": 2}, "eval": {"prompts": 4}}
    plain, vllm = (
        make_recipe(run=str(tmp_path / name), rollout={"engine": {"name": name}}, **common)
        for name in ("transformers", "vllm")
    )
    sharded = make_recipe(
        run=str(tmp_path / "sharded"), rollout=VLLM, eval={"prompts": 4}, train={"steps": 2, "sharding": "fsdp"}
    )
    two_ranks(plain, vllm, sharded)
    for mine, theirs in zip(metrics_of(vllm.run), metrics_of(sharded.run), strict=True):
        for key in ("loss/opd", "grad_norm", "response_tokens"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-5), key
    one, other = (hashes(recipe.run / "checkpoints" / "step-000002") for recipe in (plain, vllm))
    assert one == other
    assert metrics_of(vllm.run)[-1]["engine/syncs"] >= 2  # of both


def test_adapters_over_a_base_in_bfloat16_are_sampled_with_as_they_are_learned_on_ranks_too(
    make_recipe: Callable[..., Recipe], two_ranks: Callable[..., None], world: Path, tmp_path: Path
) -> None:
    model = {"path": str(world / "student"), "dtype": "bfloat16", "lora": {"rank": 4}}
    whole, sharded = (
        make_recipe(
            run=str(tmp_path / sharding),
            model=model,
            rollout=VLLM,
            eval={"prompts": 0},
            train={"steps": 3, "sharding": sharding},
        )
        for sharding in ("none", "fsdp")
    )
    two_ranks(whole, sharded)
    for recipe in (whole, sharded):
        steps = metrics_of(recipe.run)
        assert len(steps) == 3 and "engine/update_held" not in steps[0], "nothing was learned yet"
        assert all(step["engine/update_held"] == pytest.approx(1.0, abs=1e-3) for step in steps[1:])


def test_a_mismatch_over_its_limit_stops_the_run(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    # The smallest difference there is: rounding.
    engine = {"engine": {"name": "vllm", "mismatch_limit": 1e-12}}
    with pytest.raises(RolloutEngineError, match=r"over rollout\.engine\.mismatch_limit 1e-12") as error:
        train(make_recipe(run=str(tmp_path / "run"), rollout=engine, eval={"prompts": 0}))
    assert error.value.exit_code == 19
