"""A LoRA student from the first step to a served teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from run_records import metrics_of
from safetensors.torch import load_file
from slow_cases import slow
from transformers import AutoModelForCausalLM

from opd.config import parse_settings
from opd.errors import CheckpointError, ConfigError
from opd.wire.types import PayloadSpec, ScoreItem
from student.commands.evaluate_model import evaluate_model
from student.job.session import train
from student.orbit.merge import MergeSettings, merge
from student.settings.recipe import Recipe

MODEL: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "dora": False}}
TO_BASE = [{"name": "opd", "payload": "gather", "k": 8}, {"name": "reference_kl", "weight": 0.1}]


def changes(world: Path, **lora: Any) -> dict[str, Any]:
    return {"model": {"path": str(world / "student"), "lora": {**MODEL["lora"], **lora}}, "eval": {"prompts": 4}}


@pytest.mark.parametrize("dora", [False, *slow(True)])
def test_a_resumed_lora_run_equals_an_uninterrupted_one_and_saves_adapters_alone(
    make_recipe: Callable[..., Recipe],
    world: Path,
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    dora: bool,
) -> None:
    common = {**changes(world, dora=dora), "objective": TO_BASE, "teachers": {"reference": "initial"}}
    calm = train(make_recipe(run=str(tmp_path / "calm"), **common))
    train(make_recipe(run=str(tmp_path / "cut"), **common, train={"steps": 2}))
    resumed = train(make_recipe(run=str(tmp_path / "cut"), **common), resume=True)
    checkpoint = Path(resumed["checkpoint"])
    assert hashes(checkpoint) == hashes(Path(calm["checkpoint"]))
    # The reference is the model with its adapters off: no copy of it is kept nor saved.
    assert not (checkpoint / "trainer" / "local.safetensors").exists()
    files = {path.name for path in (checkpoint / "model").glob("*.safetensors")}
    assert files == {"adapter_model.safetensors"}
    one, last = (
        load_file(tmp_path / "cut" / "checkpoints" / f"step-00000{i}" / "model" / files.copy().pop()) for i in (1, 4)
    )
    assert any(not torch.equal(one[name], last[name]) for name in one)
    lines = metrics_of(tmp_path / "calm")
    # At the first step the student is its reference.
    assert lines[0]["loss/reference_kl"] == pytest.approx(0.0, abs=1e-6) and abs(lines[-1]["loss/reference_kl"]) > 1e-6


@pytest.mark.parametrize("payload", ["hidden", *slow("topk")])
def test_every_payload_trains_adapters(make_recipe: Callable[..., Recipe], world: Path, payload: str) -> None:
    term = {"name": "opd", "payload": payload} | ({"k": 8} if payload == "topk" else {})
    summary = train(make_recipe(**changes(world), objective=[term], train={"steps": 2}))
    assert summary["steps"] == 2 and summary["after"]["reverse_kl"] > 0


def test_a_trained_adapter_serves_as_a_teacher_and_merges_back(
    make_recipe: Callable[..., Recipe], world: Path, tmp_path: Path
) -> None:
    from teacher_server.build import engine_factory
    from teacher_server.engines.base import EngineItem
    from teacher_server.settings import ServerSettings

    recipe = make_recipe(**changes(world), train={"steps": 2, "learning_rate": 3e-3})
    adapter = Path(train(recipe)["checkpoint"]) / "model"
    base = AutoModelForCausalLM.from_pretrained(world / "student")
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world / "student"), adapter).eval()
    ids = torch.arange(3, 12)
    with torch.no_grad():
        logp, plain = (m(ids[None]).logits[0, :-1].log_softmax(-1) for m in (tuned, base.eval()))
    at = torch.arange(3, 8), ids[4:]
    assert (logp[at] - plain[at]).abs().max() > 1e-3

    engine = engine_factory(ServerSettings())(f"{world / 'student'}+{adapter}")
    item = ScoreItem(ids.numpy().astype(np.uint32), 4)
    [scores] = engine.score([EngineItem(item, PayloadSpec.sampled())])
    assert scores is not None
    np.testing.assert_allclose(scores.sampled, logp[at].numpy(), atol=2e-5)
    own = engine_factory(ServerSettings())(str(world / "student"))
    assert own.info.weights_hash != engine.info.weights_hash and own.info.tokenizer == engine.info.tokenizer
    own.prepare_weights(adapter)()  # an adapter on the weights it began with
    assert own.info.weights_hash == engine.info.weights_hash
    [again] = own.score([EngineItem(item, PayloadSpec.sampled())])
    assert again is not None and np.array_equal(again.sampled, scores.sampled)

    merge(
        parse_settings(MergeSettings, {"models": [{"path": f"{world / 'student'}+{adapter}"}], "dtype": "float32"}),
        tmp_path / "merged",
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids[None]).logits, tuned(ids[None]).logits, atol=1e-5, rtol=1e-4)
    quiet = make_recipe(eval={"prompts": 6, "reverse_kl": False})
    reports = [
        evaluate_model(quiet, name)
        for name in (f"{world / 'student'}+{adapter}", str(adapter), str(tmp_path / "merged"))
    ]
    assert len({(r["mean_length"], r["accuracy"]) for r in reports}) == 1


def test_what_a_lora_run_cannot_be_resumed_with_is_told_by_name(
    make_recipe: Callable[..., Recipe], world: Path
) -> None:
    quick = {"train": {"steps": 1}, "eval": {"prompts": 0}}
    train(make_recipe(**{**changes(world), **quick}))
    for lora, said in (
        ({"rank": 8}, r"model.lora.rank was 4 in this run and is 8 now, but the saved adapters have that rank"),
        ({"targets": ["q_proj"]}, "model.lora.targets was 'all-linear'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            train(make_recipe(**{**changes(world, **lora), **quick, "train": {"steps": 2}}), resume=True)
    with pytest.raises(CheckpointError, match=r"model\.lora .* null"):
        train(make_recipe(**quick), resume=True)


def test_jumps_of_weights_are_refused_under_lora(make_recipe: Callable[..., Recipe], world: Path) -> None:
    with pytest.raises(ConfigError, match="effopd extrapolates"):
        train(make_recipe(**changes(world), methods=[{"name": "effopd"}]))


@pytest.mark.slow
def test_two_ranks_train_adapters_like_one(
    make_recipe: Callable[..., Recipe], world: Path, tmp_path: Path, two_ranks: Callable[[Recipe], None]
) -> None:
    common = {
        **changes(world),
        "objective": [{"name": "opd", "payload": "hidden"}],
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "train": {"steps": 2, "micro_batch_tokens": 64},
        "eval": {"prompts": 0},
    }
    train(make_recipe(run=str(tmp_path / "one"), **common))
    two_ranks(make_recipe(run=str(tmp_path / "two"), **common))
    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step-000002" / "model" / "adapter_model.safetensors")
        for name in ("one", "two")
    )
    assert set(one) == set(two)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-3)
