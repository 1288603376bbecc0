"""What an engine with weights of its own is given, and which adapters can be added to it."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen3MoeConfig

from opd.config import parse_settings
from opd.errors import ConfigError
from student.rollout.weights import check_merges, checkpoint_tensors
from student.settings.model import ModelSettings

ATTENTION = ["q_proj", "v_proj"]


def test_adapters_on_a_mixtures_experts_are_refused_before_there_are_weights(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=2, moe_intermediate_size=4, num_experts=2)
    config.save_pretrained(tmp_path)  # and no weights

    def check(**model: object) -> None:
        check_merges(parse_settings(ModelSettings, {"path": str(tmp_path), **model}), "vllm")

    with pytest.raises(ConfigError, match=r"rollout.engine vllm .*model.layers.0.mlp.experts .*merged"):
        check(lora={"rank": 2, "targets": "all-linear"})
    model = parse_settings(ModelSettings, {"path": str(tmp_path), "lora": {"rank": 2, "targets": "all-linear"}})
    with pytest.raises(ConfigError, match=r"vllm_server .*adapters, .* cannot be sent"):
        check_merges(model, "vllm_server", merged=False)
    check(lora={"rank": 2, "targets": ATTENTION})
    check()


@pytest.mark.parametrize(("kind", "named"), [(Gemma2Config, False), (Gemma3TextConfig, True)])
def test_a_tied_head_is_named_but_for_families_that_vllm_has_without_one(kind: Any, named: bool) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = kind(**sizes, num_attention_heads=2, num_key_value_heads=2)
    found = dict(checkpoint_tensors(AutoModelForCausalLM.from_config(config)))
    assert ("lm_head.weight" in found) == named and "model.embed_tokens.weight" in found
