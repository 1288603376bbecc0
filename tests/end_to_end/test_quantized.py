"""Runs whose base is held in 4 bits and whose moments are in 8; where bitsandbytes is installed (`make quantized`)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_close, assert_same, state_of
from peft import PeftModel
from run_records import metrics_of
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError
from student.job.session import train
from student.model.model import load_student
from student.model.quantized import four_bits, keep_layout
from student.settings.model import LoraSettings
from student.settings.recipe import Recipe
from student.state.state_io import load_state

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

LORA = {"rank": 8, "alpha": 16}
CASES: dict[str, dict[str, Any]] = {
    "a whole model with moments in 8 bits": {"optimizer": "adamw_8bit"},
    "adapters over 4 bits": {"lora": LORA | {"quantize": "nf4"}},
    # A rank high enough that the factors have the 4,096 elements from which moments are in 8 bits.
    "both, sampled ahead": {
        "lora": {"rank": 64, "alpha": 64, "quantize": "nf4"},
        "optimizer": "adamw_8bit",
        "max_staleness": 1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_in_few_bits_equals_an_uninterrupted_one(
    make_recipe: Callable[..., Recipe],
    world: Path,
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    case: str,
) -> None:
    settings = dict(CASES[case])
    changes: dict[str, Any] = {
        "model": {"path": str(world / "student"), "lora": settings.pop("lora", None)},
        "objective": [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
        "rollout": {"prompts_per_step": 2},
        "eval": {"prompts": 0},
        "train": settings,
    }
    calm, cut = (make_recipe(run=str(tmp_path / name), **changes) for name in ("calm", "cut"))
    ended = Path(train(calm)["checkpoint"])
    shutil.copytree(calm.run, cut.run)  # as a kill within the third step would have left it
    for step in (3, 4):
        shutil.rmtree(cut.run / "checkpoints" / f"step-{step:06d}")
    assert hashes(Path(train(cut, resume=True)["checkpoint"])) == hashes(ended)
    lines = metrics_of(calm.run)
    assert len({line["loss/opd"] for line in lines}) == 4
    moments = load_state(ended / "trainer", "learner")["moments"]
    codes = {state["moment1"].dtype for state in moments.values()} if "optimizer" in settings else set()
    assert (torch.uint8 in codes) == ("optimizer" in settings)
    if (lora := changes["model"]["lora"]) is not None:  # the saved adapter, by plain peft, over a base in 4 bits
        base, ids = str(world / "student"), torch.arange(12).reshape(2, 6)
        plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits(torch.float32))
        adapter = Path(ended) / "model"
        mine = load_student(
            base,
            dtype="float32",
            attention=None,
            gradient_checkpointing=False,
            lora=LoraSettings(**lora),
            adapter=adapter,
        )
        with torch.no_grad():
            keep_layout(plain)
            found = PeftModel.from_pretrained(plain, adapter).eval()(ids).logits
            assert torch.equal(found, mine.lm.eval()(ids).logits)
    other = "adamw" if "optimizer" in settings else "adamw_8bit"
    swapped = cut.model_copy(update={"train": cut.train.model_copy(update={"optimizer": other, "steps": 5})})
    with pytest.raises(CheckpointError, match=f"moments .* train.optimizer {other}"):
        train(swapped, resume=True)


def test_two_ranks_resume_a_sharded_student_with_moments_in_eight_bits_and_one_goes_on_alone(
    make_recipe: Callable[..., Recipe], world: Path, tmp_path: Path, two_ranks: Callable[..., Any]
) -> None:
    changes: dict[str, Any] = {
        "model": {"path": str(world / "padded")},  # whose larger tensors two ranks share between two blocks
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        "rollout": {"prompts_per_step": 2},
        "eval": {"prompts": 0},
    }
    settings: dict[str, Any] = {"sharding": "fsdp", "optimizer": "adamw_8bit"}
    calm = make_recipe(run=str(tmp_path / "calm"), **changes, train=settings)
    cut = [
        make_recipe(run=str(tmp_path / "cut"), **changes, train={**settings, "steps": steps, "async_checkpoints": True})
        for steps in (2, 4)
    ]
    half = make_recipe(
        **{**changes, "model": {**changes["model"], "dtype": "bfloat16"}}, train={**settings, "steps": 2}
    )
    two_ranks(calm, *cut, half)
    assert_same(*(state_of(recipe.run / "checkpoints" / "step-000004") for recipe in (calm, cut[1])))
    saved = state_of(half.run / "checkpoints" / "step-000002")
    assert {torch.bfloat16, torch.uint8, torch.float32} == {tensor.dtype for tensor in saved.values()}
    for sharding in ("fsdp", "none"):
        alone = make_recipe(run=str(tmp_path / sharding), **changes, train={**settings, "sharding": sharding})
        shutil.copytree(calm.run, alone.run, ignore=shutil.ignore_patterns("step-000003", "step-000004"))
        ended = Path(train(alone, resume=True)["checkpoint"])
        assert_close(state_of(ended), state_of(calm.run / "checkpoints" / "step-000004"))
        moments = load_state(ended / "trainer", "learner")["moments"].values()
        assert all((s["moment1"].dtype == torch.uint8) == (s["moment1"].numel() >= 4096) for s in moments)
        assert any(s["moment1"].dtype == torch.uint8 for s in moments)
    swapped = alone.model_copy(update={"train": alone.train.model_copy(update={"optimizer": "adamw", "steps": 5})})
    with pytest.raises(CheckpointError, match=r"moments .* train.optimizer adamw"):
        train(swapped, resume=True)
