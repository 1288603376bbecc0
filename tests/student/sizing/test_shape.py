"""What is counted of a model from its config alone, and which families can only be counted in part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from transformers import DynamicCache

from opd.errors import ConfigError
from student.settings.model import ModelSettings
from student.sizing.shape import ModelShape
from tests.support.families import tiny


def shape(folder: Path, family: str, **settings: Any) -> ModelShape:
    tiny(family).config.save_pretrained(folder)
    return ModelShape(ModelSettings(path=str(folder), **settings))


def cached(family: str, tokens: int) -> int:
    """Bytes that a real cache holds after so many tokens."""
    lm = tiny(family)
    cache: Any = DynamicCache(config=lm.config)
    with torch.no_grad():
        lm.base_model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        for held in vars(layer).values():
            parts = held.values() if isinstance(held, dict) else held if isinstance(held, list) else [held]
            found += [part for part in parts if isinstance(part, torch.Tensor)]
    return sum(tensor.numel() * 4 for tensor in found)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "jamba", *slow("qwen3_next", "lfm2", "granitemoehybrid")])
def test_keys_values_and_states_are_those_of_a_real_cache(tmp_path: Path, family: str) -> None:
    made = shape(tmp_path, family)
    assert made.cache_bytes is not None and made.state_bytes is not None
    assert 9 * made.cache_bytes + made.state_bytes == cached(family, 9)
    assert (made.state_bytes > 0) == (family != "llama")


@pytest.mark.parametrize(
    ("family", "unknown"),
    [
        ("jetmoe", {"cache", "activations"}),
        ("llama4_text", {"activations"}),
        ("minimax", {"cache"}),
        ("mamba", {"cache"}),
    ],
)
def test_what_a_family_does_not_let_count_is_not_known(tmp_path: Path, family: str, unknown: set[str]) -> None:
    made = shape(tmp_path, family)
    found = {"cache"} if made.cache_bytes is None else set()
    assert found | ({"activations"} if made.activation_bytes(2, 8) is None else set()) == unknown
    assert made.total == sum(p.numel() for p in tiny(family).parameters())


@pytest.mark.parametrize("family", ["opt", "qwen3_5_text", *slow("biogpt", "xglm")])
def test_layers_that_are_recomputed_save_less(tmp_path: Path, family: str) -> None:
    plain, again = (shape(tmp_path, family, gradient_checkpointing=on).activation_bytes(2, 64) for on in (False, True))
    assert plain is not None and again is not None and again < plain
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        shape(tmp_path, "ctrl", gradient_checkpointing=True).activation_bytes(2, 8)
