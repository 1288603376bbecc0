"""Batches: models whose cache is more than keys and values, and models that cannot be decoded with a cache at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from opd.errors import ConfigError, NonFiniteError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow
from student.data.row import Row, RowKey
from student.model.model import ProjectionSpec, Student, logits_of
from student.rollout.requests import RolloutSpec
from student.rollout.slots import takes_slots
from student.rollout.transformers import rollout

_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "state_size": 8, "sliding_window": 6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
}  # fmt: skip
_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.fixture(scope="module")
def tokenizer(world: Path) -> Any:
    torch.set_num_threads(1)
    return AutoTokenizer.from_pretrained(world / "student")


def made(family: str, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **_SHAPE, **_LAYERS.get(family, {}))
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def sampled(model: Any, tokenizer: Any) -> list[Row]:
    # Prompts and answers of different lengths: rows are padded, and leave one after the other.
    planned = [
        PlannedRow(RowKey(1, str(i), 0), Prompt.make("+".join(["7"] * (1 + i % 4)) + "="), 3 + 5 * i, 1.0)
        for i in range(6)
    ]
    spec = RolloutSpec(seed=7, batch_rows=8, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    return rollout(model, tokenizer, planned, spec)


def learnt(model: Any, row: Row, vocab: int) -> np.ndarray:
    """Log-probs of the row's tokens as the learner computes them."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
    source = torch.arange(len(row.prompt_ids) - 1, ids.shape[1] - 1)
    student = Student(model)
    with torch.no_grad():
        hidden = student(ids, torch.ones_like(ids), torch.zeros_like(source), source)
        logp = logits_of(hidden, student.head(), ProjectionSpec(frozenset(), vocab, 1.0)).log_softmax(-1)
    return np.asarray(logp.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0])


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "lfm2"])
def test_rows_of_models_with_recurrent_states_are_those_of_whole_forwards_as_others_leave(
    tokenizer: Any, family: str
) -> None:
    model = made(family, tokenizer)
    assert not takes_slots(model, 99)
    for row in sampled(model, tokenizer):
        np.testing.assert_allclose(row.behaviour_logp, learnt(model, row, len(tokenizer)), atol=1e-3)


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_a_model_that_would_lose_its_context_from_token_to_token_is_refused(tokenizer: Any, family: str) -> None:
    model = made(family, tokenizer)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"decode a \w+ForCausalLM .*rollout\.engine"):
            sampled(model, tokenizer)


def test_a_head_in_halves_is_not_rounded_back_to_halves(tokenizer: Any) -> None:
    """As in slots and in the learner; a model's own logits in bfloat16 are off by 0.03 at a size of 8 to 16."""
    model = made("mistral", tokenizer, torch.bfloat16)
    assert not takes_slots(model, 99)
    with torch.no_grad():
        model.lm_head.weight *= 4
    gaps = [
        np.abs(row.behaviour_logp[:1] - learnt(model, row, len(tokenizer))[:1]) for row in sampled(model, tokenizer)
    ]
    assert np.max(gaps) < 0.005


def test_a_model_without_numbers_is_not_taken_for_one_of_another_kind(tokenizer: Any) -> None:
    model = made("mistral", tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="log-probs were not finite"):
        sampled(model, tokenizer)
