"""Adapters of LoRA inside vLLM: what was learned reaches the rollouts where merging would round it away."""

import copy
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from opd.config import parse_settings
from student.model.lora import add_lora
from student.rollout.engine import ROLLOUT_ENGINES, EngineSetup
from student.rollout.requests import RolloutSpec
from student.rollout.vllm.draws import Draw
from student.settings.model import LoraSettings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]
PROMPTS = [f"{i}+{i * 7}=" for i in range(32)]
LEARNED = "99999999"
"""The answer that the student learns to give."""
Open = Callable[..., Any]


@pytest.fixture
def open_engine(world: Path) -> Iterator[Open]:
    """Open an engine for a student of LoRA over a base in bfloat16, which has learned a share `size` of its weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened: list[Any] = []
    path = str(world / "student")

    def make(lora: dict[str, Any] | None = None, size: float = 5e-4, **settings: Any) -> Any:
        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        add_lora(model, LoraSettings(**{"rank": 4, **(lora or {})}), base=path)
        learn(model, tokenizer, size)
        cls = ROLLOUT_ENGINES.load("vllm")
        opened.append(cls(parse_settings(cls.settings_type, {"name": "vllm", **settings})))
        spec = RolloutSpec(seed=7, batch_rows=16, candidates=0, valid_vocab=len(tokenizer), max_prompt_tokens=40)
        opened[-1].open(EngineSetup(model, tokenizer, spec, path))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def learn(model: Any, tokenizer: Any, size: float) -> None:
    """A step towards the answer: the product of each adapter gets `size` of the deviation of its weight.

    As when it is learned, it lies along what the layer reads: otherwise rounding activations would lose it as well.
    """
    layers = [module for module in model.modules() if hasattr(module, "lora_B")]
    for layer in layers:
        layer.base_layer.weight.requires_grad_(True)
    for prompt, answer in texts(tokenizer):
        labels = torch.tensor([[-100] * len(prompt) + answer])
        model(torch.tensor([prompt + answer]), labels=labels).loss.backward()
    for layer in layers:
        weight, first, second = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        rank = min(len(first), *weight.shape)
        u, s, v = torch.linalg.svd(weight.grad.float())
        first.data[:rank], second.data[:, :rank] = v[:rank], -u[:, :rank] * s[:rank]
        second.data *= size * weight.float().std() / (layer.scaling["default"] * (second @ first)).std()
        weight.requires_grad_(False)
    model.zero_grad()


def texts(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """The ids of each prompt and its answer."""
    answer = tokenizer(LEARNED, add_special_tokens=False).input_ids
    return [(tokenizer(prompt).input_ids, answer) for prompt in PROMPTS]


def synced(engine: Any) -> float:
    """Sync the engine; gives the share of what was learned that it holds."""
    engine.sync([(name, p) for name, p in engine.setup.model.named_parameters() if p.requires_grad], 3)
    counts = engine.take()
    return float(counts["engine/update_along"] / counts["engine/update_square"])


def reached(engine: Any) -> float:
    """How much of the change in the answers' log-probs, as computed in float32, the engine shows."""
    given, spec = texts(engine.setup.tokenizer), engine.setup.spec
    exact = copy.deepcopy(engine.setup.model).float()
    learned = log_probs(exact, given, spec.valid_vocab)
    exact.disable_adapters()
    start = log_probs(exact, given, spec.valid_vocab)
    draws = [Draw(spec, np.full(len(answer), 0.5), 1.0, answer) for _, answer in given]
    work = [(draw, prompt, frozenset[int](), len(answer)) for draw, (prompt, answer) in zip(draws, given, strict=True)]
    engine._run(work, lambda place, ids: None)
    change, found = learned - start, np.concatenate([draw.logp for draw in draws]) - start
    return float(change @ found / (change @ change))


@torch.no_grad()
def log_probs(model: Any, given: list[tuple[list[int], list[int]]], vocabulary: int) -> NDArray[np.float32]:
    """Those of all tokens of the answers, nats."""
    found = []
    for prompt, answer in given:
        logp = model(torch.tensor([prompt + answer])).logits[0, :-1, :vocabulary].log_softmax(-1)
        found.append(logp[len(prompt) - 1 :].gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy())
    return np.concatenate(found)


def test_a_small_update_over_a_base_in_bfloat16_reaches_the_rollouts(open_engine: Open) -> None:
    engine = open_engine()
    assert synced(engine) == pytest.approx(1.0, abs=1e-3)
    assert reached(engine) > 0.75
    engine.close()
    merged = open_engine(options={"enable_lora": False})
    assert synced(merged) < 0.9 and reached(merged) < 0.6


def test_vllm_holds_the_factors_at_their_scale(open_engine: Open) -> None:
    engine = open_engine()
    synced(engine)
    layers = [module for module in engine.setup.model.modules() if hasattr(module, "lora_B")]
    sent = [module.scaling["default"] * module.lora_B["default"].weight for module in layers]
    (held,) = engine._llm.apply_model(second_factors)
    assert held == pytest.approx(sum(float(factor.detach().square().sum()) for factor in sent), rel=1e-2)


def second_factors(model: Any) -> float:
    """The sum of squares of the second factors that vLLM's layers hold."""
    stacks = [getattr(module, "lora_b_stacked", ()) for module in model.modules()]
    return sum(float(factor.float().square().sum()) for stack in stacks for factor in stack)


def test_rows_are_drawn_with_the_adapters_of_the_last_sync(open_engine: Open) -> None:
    engine = open_engine(size=0.1)  # far above what rounding does to activations
    synced(engine)
    assert reached(engine) == pytest.approx(1.0, abs=0.05)
    with torch.no_grad():
        for name, parameter in engine.setup.model.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    synced(engine)
    assert reached(engine) == pytest.approx(1.0, abs=0.05)
    engine.close()
    synced(engine)
    assert reached(engine) == pytest.approx(1.0, abs=0.05), "after a restart too"


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"dora": True}, "vLLM has no DoRA"),
        ({"rank": 513}, "adapters of rank 512 at most, and model.lora.rank is 513"),
    ],
)
def test_adapters_that_vllm_does_not_apply_are_merged_and_why_is_said(
    open_engine: Open, caplog: pytest.LogCaptureFixture, lora: dict[str, Any], why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = open_engine(lora)
    assert "adapters are merged" in caplog.text and why in caplog.text
    assert synced(engine) < 0.9


def test_adapters_that_vllm_leaves_out_are_found_by_a_trial_and_merged(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = open_engine(options={"lora_target_modules": ["o_proj"]})
    assert "entries of adapters" in caplog.text or "target modules" in caplog.text
    assert synced(engine) < 0.9


def test_in_float32_adapters_are_merged_without_a_word(open_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = open_engine(dtype="float32")
    assert "merged" not in caplog.text and synced(engine) == pytest.approx(1.0)
