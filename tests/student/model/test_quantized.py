"""Bases in 4 bits: what they hold, that they learn exactly as they sample, and what few bits do not go with."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.job.plugins import build_plugins
from student.model.lora import adapters_off
from student.model.model import Student, load_student
from student.model.quantized import four_bit_bytes
from student.rollout.ahead import copy_of
from student.rollout.requests import RolloutSpec
from student.rollout.transformers import rollout
from student.settings.model import LoraSettings
from student.settings.recipe import Recipe
from student.sizing.shape import ModelShape

IDS = torch.arange(12).reshape(2, 6)


def quantized(world: Path, **settings: Any) -> Student:
    pytest.importorskip("bitsandbytes")
    lora = LoraSettings(rank=4, alpha=8, quantize="nf4", **settings)
    return load_student(
        str(world / "student"), dtype="float32", attention=None, gradient_checkpointing=False, lora=lora
    )


def gradients(student: Student) -> dict[str, torch.Tensor]:
    student.train()
    student.zero_grad()
    student.lm.base_model(IDS).last_hidden_state.square().sum().backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dora", [False, True])
def test_a_base_in_four_bits_learns_the_same_after_a_rollout_as_before(world: Path, dora: bool) -> None:
    student = quantized(world, dora=dora)
    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    planned = plan_step(0, [Prompt.make("12+34=")], samples=4, max_new_tokens=8, temperature=1.0).rows
    with torch.no_grad():
        base = student.lm.eval()(IDS).logits
        for p in student.parameters():
            if p.requires_grad:
                p.add_(0.05)
    before = gradients(student)
    assert before and all("lora_" in name for name in before)
    rows = [rollout(lm, tokenizer, planned, RolloutSpec(7, 64, 0, len(tokenizer), 40)) for lm in twice(student)]
    for one, other in zip(*rows, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.behaviour_logp.tolist() == other.behaviour_logp.tolist()
    after = gradients(student)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    student.eval()
    with torch.no_grad(), adapters_off(student.lm):
        assert torch.equal(student.lm(IDS).logits, base)


def twice(student: Student) -> list[Any]:
    """The model, and the copy that another thread would sample from, on the same 4-bit weights."""
    copied = copy_of(student.lm)
    mine, theirs = (dict(lm.named_parameters()) for lm in (student.lm, copied))
    packed = [name for name, p in mine.items() if p.dtype is torch.uint8]
    assert packed and all(mine[name].data_ptr() == theirs[name].data_ptr() for name in packed)
    return [student.lm, copied]


def test_the_plan_counts_the_bytes_that_weights_take(world: Path, recipe: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    student = quantized(world)
    states = {id(m): m.weight.quant_state for m in student.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    scales = sum(s.absmax.nbytes + s.state2.absmax.nbytes for s in states.values())
    held = sum(p.numel() * p.element_size() for p in student.parameters()) + scales
    lora = {"rank": 4, "alpha": 8, "quantize": "nf4"}
    shape = ModelShape(parse_settings(Recipe, recipe(model={"lora": lora})).model)
    assert shape.weight_bytes == held and shape.widened > 0
    assert shape.weight_bytes < ModelShape(parse_settings(Recipe, recipe()).model).weight_bytes
    assert four_bit_bytes(64 * 256) == 8192 + 256 + 4


@pytest.fixture
def recipe(world: Path, tmp_path: Path) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        data: dict[str, Any] = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": ["127.0.0.1:1"]},
            "prompts": {"task": "addition"},
            "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        }
        for key, value in changes.items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
        return data

    return make


FOUR = {"model": {"lora": {"quantize": "nf4"}}}
EIGHT = {"train": {"optimizer": "adamw_8bit"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (FOUR | {"rollout": {"engine": {"name": "vllm"}}}, "vllm holds weights of its own .* quantize to null"),
        (FOUR | {"train": {"sharding": "fsdp"}}, "model.lora.quantize stores blocks of codes .*sharding: none"),
        (
            EIGHT | {"methods": [{"name": "effopd", "moments": "reset"}]},
            "adamw_8bit stores them in 8 bits; set moments",
        ),
    ],
)
def test_what_four_and_eight_bits_do_not_go_with_is_refused(recipe: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_plugins(parse_settings(Recipe, recipe(**changes)))


@pytest.mark.parametrize("changes", [FOUR, EIGHT])
def test_a_missing_bitsandbytes_is_said_before_anything_is_loaded(
    recipe: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.extras.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs bitsandbytes, .* pip install 'opd\[quantized\]'"):
        build_plugins(parse_settings(Recipe, recipe(**changes)))
