"""Which adapters can be added to the weights that an engine is given."""

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from opd.config import parse_settings
from opd.errors import ConfigError
from student.recipe import ModelSettings
from student.rollout.weights import check_merges

ATTENTION = ["q_proj", "v_proj"]


def test_adapters_on_a_mixtures_experts_are_refused_before_there_are_weights(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=2, moe_intermediate_size=4, num_experts=2)
    config.save_pretrained(tmp_path)  # and no weights

    def check(**model: object) -> None:
        check_merges(parse_settings(ModelSettings, {"path": str(tmp_path), **model}), "vllm")

    with pytest.raises(ConfigError, match=r"rollout.engine vllm .* of model.layers.0.mlp.experts .* cannot be merged"):
        check(lora={"rank": 2, "targets": "all-linear"})
    model = parse_settings(ModelSettings, {"path": str(tmp_path), "lora": {"rank": 2, "targets": "all-linear"}})
    with pytest.raises(ConfigError, match=r"vllm_server is given the adapters, and those of .* cannot be sent"):
        check_merges(model, "vllm_server", merged=False)
    check(lora={"rank": 2, "targets": ATTENTION})
    check()
