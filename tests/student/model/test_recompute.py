"""The mode in which the student learns: without dropout unless asked for, and checkpointed in either mode."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from opd.errors import ConfigError
from student.model.model import Student
from student.model.recompute import recompute
from tests.support.families import tiny

IDS = torch.arange(1, 13).reshape(2, 6)
RANDOM: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {},
    "opt-layerdrop": {"layerdrop": 0.5},
    "xglm": {},
    "biogpt": {},
    "gpt_bigcode": {},
    "ctrl": {},
    "llama": {"attention_dropout": 0.5},
    "phimoe": {"input_jitter_noise": 0.5, "router_jitter_noise": 0.5},
    "mixtral": {"router_jitter_noise": 0.9},
}
"""Families that are random in train mode, some by their defaults."""


def student(name: str, **keywords: Any) -> Student:
    return Student(tiny(name.removesuffix("-layerdrop"), **RANDOM.get(name, {})), **keywords)


def states(model: Student) -> Tensor:
    row = torch.tensor([0, 0, 1, 1])
    found: Tensor = model(IDS, torch.ones_like(IDS), row, torch.tensor([1, 5, 2, 4]))
    return found


def gradients(model: Student) -> list[Tensor]:
    torch.manual_seed(1)
    states(model).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", RANDOM)
def test_a_student_learns_the_distribution_that_is_sampled_unless_dropout_is_asked_for(name: str) -> None:
    learning = student(name)
    config = learning.lm.config.to_dict()
    sampled = states(learning.eval())
    assert torch.equal(states(learning.train()), sampled)
    assert learning.lm.config.to_dict() == config
    noisy = student(name, dropout=True)
    torch.manual_seed(0)
    assert not all(torch.allclose(states(noisy), sampled, atol=1e-4) for _ in range(4))
    assert torch.equal(states(noisy.eval()), sampled)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "phimoe", "qwen3_5_text", "jetmoe", "falcon_h1"])
def test_layers_run_again_in_the_backward_pass_with_the_same_gradient(name: str, dropout: bool) -> None:
    plain, again = (student(name, dropout=dropout) for _ in range(2))
    recompute(again.lm)
    runs: Counter[int] = Counter()
    layers = [m for m in again.lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: runs.update([id(module)]))
    with torch.no_grad():
        states(again)
    assert {runs[id(layer)] for layer in layers} == {1}
    wanted, found = gradients(plain), gradients(again)
    assert len(layers) == 2 and {runs[id(layer)] for layer in layers} == {3}
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * max(1.0, float(one.abs().max())))


def test_what_undoes_it_leaves_the_layers_as_they_were() -> None:
    lm = tiny("llama")
    before = [type(module) for module in lm.modules()]
    recompute(lm)()
    assert [type(module) for module in lm.modules()] == before


def test_a_model_whose_layers_are_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.* CTRLLMHeadModel"):
        recompute(tiny("ctrl"))
