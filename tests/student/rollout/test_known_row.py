"""The known row as the student reads it."""

from pathlib import Path

import numpy as np
import torch
from other_weights import train_adapters
from transformers import AutoModelForCausalLM

from student.model.lora import adapters_off, add_lora
from student.rollout.known_row import KnownRow, Reader, distance, tolerance
from student.rollout.requests import RolloutSpec
from student.settings.model import LoraSettings


def test_it_is_read_with_the_adapters_while_another_thread_has_them_off_for_the_reference(world: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    add_lora(model, LoraSettings(rank=4), base=str(world / "student"))
    train_adapters(model)
    spec = RolloutSpec(
        seed=7, batch_rows=4, candidates=0, valid_vocab=int(model.config.vocab_size), max_prompt_tokens=9
    )
    row = KnownRow.of(spec, 64)
    expected = Reader(model, spec).log_probs(row, {})
    zeroed = {name: torch.zeros_like(p) for name, p in model.named_parameters() if "lora_B" in name}
    assert distance(Reader(model, spec).log_probs(row, zeroed), expected) > 0.01  # the adapters do something
    with adapters_off(model):
        assert np.array_equal(Reader(model, spec).log_probs(row, {}), expected)
        assert all(layer._disable_adapters for layer in model.modules() if hasattr(layer, "_disable_adapters"))


def test_the_less_precise_of_student_and_engine_decides_how_far_apart_they_may_be() -> None:
    assert tolerance("float32", "bfloat16") == tolerance("bfloat16", "float32") > tolerance("float32", "float32")
