"""Random models of Qwen3's architecture for the benchmarks of engines and server."""

from collections.abc import Mapping
from pathlib import Path

import torch

SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8192}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""Sizes of a config for a CPU."""


def save_model(folder: Path, shape: Mapping[str, int], dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Write random weights, with sizes of the config in `shape`; returns how many the layers and the head have."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=4096, tie_word_embeddings=False, dtype=dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    head = shape["vocab_size"] * shape["hidden_size"]
    return {"layers": sum(p.numel() for p in model.parameters()) - 2 * head, "head": head}
