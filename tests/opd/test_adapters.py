"""Adapters are merged exactly, or refused by what they touch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from opd.adapters import ADAPTER_WEIGHTS, adapter_settings, fold_adapter
from opd.errors import ConfigError

_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
_SIZES |= {"vocab_size": 64, "num_key_value_heads": 1, "n_head": 2, "n_layer": 2, "initializer_range": 0.3}
Adapted = Callable[..., tuple[Any, Path]]


def base(family: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SIZES | changes)).eval()


@pytest.fixture
def adapted(tmp_path: Path) -> Adapted:
    """adapted(model, kind of config, **settings) -> (peft's model, folder of an adapter that has learned something)."""

    def make(model: Any, kind: Any = peft.LoraConfig, **settings: Any) -> tuple[Any, Path]:
        if kind is peft.LoraConfig:
            settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | settings
        torch.manual_seed(1)
        found = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for parameter in found.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        found.save_pretrained(tmp_path / "adapter")
        return found.eval(), tmp_path / "adapter"

    return make


def edit(adapter: Path, change: Callable[[str], str | None]) -> None:
    """Rename the tensors of an adapter, or leave those out for which there is no name."""
    file = adapter / ADAPTER_WEIGHTS
    named = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in named.items() if name is not None}, file, {"format": "pt"})


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.arange(24).reshape(2, 12)).logits


EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by a regular expression": ({}, {"target_modules": r".*(q_proj|up_proj)"}),
    "an untied head": ({}, {"target_modules": ["q_proj", "lm_head"]}),
    "untied embeddings": ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "an untied head that is saved whole": ({}, {"modules_to_save": ["lm_head"]}),
    "tokens of untied embeddings": ({}, {"trainable_token_indices": [1, 2]}),
    "norms that are saved whole": ({"tie_word_embeddings": True}, {"modules_to_save": ["norm"]}),
    "DoRA": ({"tie_word_embeddings": True}, {"use_dora": True}),
    "rsLoRA": ({"tie_word_embeddings": True}, {"use_rslora": True}),
    "biases": ({"attention_bias": True}, {"bias": "all"}),
}


@pytest.mark.parametrize("case", EXACT)
def test_what_can_be_merged_equals_the_adapters_own_forward(adapted: Adapted, case: str) -> None:
    config, settings = EXACT[case]
    own, adapter = adapted(base(**config), **settings)
    torch.testing.assert_close(logits(fold_adapter(base(**config), adapter)), logits(own), rtol=0, atol=1e-4)


TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "a head by a regular expression": ("llama", {"target_modules": r".*(q_proj|lm_head)"}),
    "embeddings by a regular expression": ("llama", {"target_modules": r"model\.(layers\.0\..*q_proj|embed_tokens)"}),
    "a head by its name": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings of another name": ("bloom", {"target_modules": ["query_key_value", "word_embeddings"]}),
    "a head that is saved whole": ("llama", {"modules_to_save": ["lm_head"]}),
    "tokens": ("llama", {"trainable_token_indices": {"embed_tokens": [1, 2]}}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", TIED)
def test_what_is_tied_to_something_else_is_refused_by_both_names(adapted: Adapted, case: str) -> None:
    family, settings = TIED[case]
    _, adapter = adapted(base(family, tie_word_embeddings=True), **settings)
    with pytest.raises(ConfigError, match=r"one weight for \S*embed\S* .*lm_head"):
        fold_adapter(base(family, tie_word_embeddings=True), adapter)


OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "layer_replication": (peft.LoraConfig, {"layer_replication": [[0, 2], [1, 2]]}),
    "alora_invocation_tokens": (peft.LoraConfig, {"alora_invocation_tokens": [3, 4]}),
    "IA3": (peft.IA3Config, {"target_modules": ["k_proj"], "feedforward_modules": []}),
    "PROMPT_TUNING": (peft.PromptTuningConfig, {"num_virtual_tokens": 2}),
    "PREFIX_TUNING": (peft.PrefixTuningConfig, {"num_virtual_tokens": 2}),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_cannot_be_merged_is_refused_from_its_settings(adapted: Adapted, case: str) -> None:
    kind, settings = OTHER[case]
    _, adapter = adapted(base(), kind, **settings)
    with pytest.raises(ConfigError, match=case):
        adapter_settings(adapter)


def test_what_peft_itself_cannot_merge_is_refused(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    _, adapter = adapted(base(), alora_invocation_tokens=[3, 4])
    monkeypatch.setattr("opd.adapters._NOT_ADDED", ())
    with pytest.raises(ConfigError, match=r"cannot be merged .*aLoRA"):
        fold_adapter(base(), adapter)


CHANGED: dict[str, tuple[Callable[[str], str | None], str]] = {
    "lost tensors": (lambda name: None if "layers.1" in name else name, r"lacks \S*layers\.1\."),
    "another model's layers": (lambda name: name.replace("layers.1", "layers.7"), r"lacks \S*layers\.1\."),
    "a compiled model": (
        lambda name: name.replace("model.model.", "model._orig_mod.model."),
        r"'_orig_mod\.' .*save_file",
    ),
    "a wrapped model": ("module.{}".format, r"'module\.' .*save_file"),
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("case", CHANGED)
def test_an_adapter_with_other_tensors_than_its_base_calls_for_is_refused(adapted: Adapted, case: str) -> None:
    change, said = CHANGED[case]
    _, adapter = adapted(base())
    edit(adapter, change)
    with pytest.raises(ConfigError, match=said):
        fold_adapter(base(), adapter)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"hidden_size": 64}])
def test_an_adapter_of_a_larger_or_smaller_base_is_refused(adapted: Adapted, changes: dict[str, Any]) -> None:
    _, adapter = adapted(base())
    with pytest.raises(ConfigError, match="not fit its base"):
        fold_adapter(base(**changes), adapter)


def test_quantized_weights_are_refused_with_what_to_name_instead(adapted: Adapted) -> None:
    _, adapter = adapted(base())
    model = base()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"are quantized .*made from"):
        fold_adapter(model, adapter)


def test_an_adapter_saved_under_another_name_is_found_in_its_folder(adapted: Adapted) -> None:
    _, adapter = adapted(base())
    (adapter / "second").mkdir()
    for file in list(adapter.glob("adapter_*")):
        file.rename(adapter / "second" / file.name)
    with pytest.raises(ConfigError, match=r"did you mean .*/second"):
        adapter_settings(adapter)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_damaged_settings_are_refused_in_a_sentence(adapted: Adapted, text: str) -> None:
    _, adapter = adapted(base())
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        adapter_settings(adapter)


def test_weights_that_are_a_pointer_are_refused_by_name(adapted: Adapted) -> None:
    _, adapter = adapted(base())
    (adapter / ADAPTER_WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        adapter_settings(adapter)
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
