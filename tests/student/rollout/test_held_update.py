"""How much of an update is left when weights are rounded for rollouts."""

import logging

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from student.model.lora import adapter_tensors, add_lora
from student.rollout.held_update import HeldUpdate
from student.rollout.weights import checkpoint_tensors
from student.settings.model import LoraSettings


def model(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, num_key_value_heads=2)).to(dtype)


def share(measure: HeldUpdate, lm: LlamaForCausalLM) -> float | None:
    """What a sync of the model would report."""
    counts: dict[str, float] = {}
    for _ in measure.through(checkpoint_tensors(lm)):
        pass
    measure.report(counts.__setitem__)
    return counts["update_along"] / counts["update_square"] if counts["update_square"] else None


def learn(parameters: list[Tensor], size: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * size)


@pytest.mark.parametrize(("size", "left"), [(1e-4, 0.06), (1e-3, 0.55), (1e-2, 1.0)])
def test_whole_weights_lose_updates_below_the_rounding_of_their_start(size: float, left: float) -> None:
    lm = model().float()
    measure = HeldUpdate(lm, "bfloat16")
    assert share(measure, lm) is None
    learn([p for p in lm.parameters() if p.ndim == 2], size)
    assert share(measure, lm) == pytest.approx(left, abs=0.1)
    assert share(HeldUpdate(lm, "bfloat16"), lm) is None


def test_float32_keeps_everything() -> None:
    lm = model().float()
    measure = HeldUpdate(lm, "float32")
    share(measure, lm)
    learn(list(lm.parameters()), 1e-4)
    assert share(measure, lm) == pytest.approx(1.0)


def test_merged_adapters_are_compared_with_their_base_from_the_first_sync_on(caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run has learned something before its first sync."""
    lm = model()
    add_lora(lm, LoraSettings(rank=4), base="base")
    measure = HeldUpdate(lm, "bfloat16")
    assert share(measure, lm) is None
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 1e-5)
    with caplog.at_level(logging.WARNING):
        small = share(HeldUpdate(lm, "bfloat16"), lm)
        assert small is not None and small < 0.5 and share(measure, lm) == small
        share(measure, lm)
    assert caplog.text.count("of what was learned") == 2, "each measure warns once"


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_adapters_that_are_not_merged_keep_what_was_learned(size: float) -> None:
    lm = model()
    add_lora(lm, LoraSettings(rank=4), base="base")
    measure, counts = HeldUpdate(lm, "bfloat16"), dict[str, float]()
    measure.adapters(adapter_tensors(lm, {})[0])
    measure.report(counts.__setitem__)
    assert counts == {"update_along": 0.0, "update_square": 0.0}, "nothing was learned yet"
    second = [p for name, p in lm.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for parameter in second:
            parameter.normal_(0, size)
    factors, _ = adapter_tensors(lm, {})
    measure.adapters(factors)
    measure.report(counts.__setitem__)
    assert counts["update_along"] / counts["update_square"] == pytest.approx(1.0, abs=1e-3)
    products = [
        (factors[name] @ factors[name.replace("lora_B", "lora_A")]).square().sum()
        for name in factors
        if "lora_B" in name
    ]
    assert counts["update_square"] == pytest.approx(float(sum(products)), rel=1e-4)
