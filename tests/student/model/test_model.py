"""Loading the student."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import http_backoff
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from opd.errors import ConfigError, UnavailableError
from student.model import model
from student.model.ranks import ALONE
from student.run.model_folder import model_parts
from student.settings.model import LoraSettings


@pytest.fixture
def gemma2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A random Gemma 2 whose attention soft-cap bites; it needs no tokenizer here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    lm = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, attn_logit_softcapping=0.01, initializer_range=0.5))
    lm.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_soft_cap_on_attention_logits_is_kept(gemma2: str) -> None:
    ids = torch.arange(24)[None]
    found = {}
    for name in (None, "eager"):
        student = model.load_student(gemma2, dtype="float32", attention=name, gradient_checkpointing=False)
        found[name] = student.lm.eval()(ids).logits.log_softmax(-1)
    sdpa = Gemma2ForCausalLM.from_pretrained(gemma2, attn_implementation="sdpa").eval()(ids).logits.log_softmax(-1)
    torch.testing.assert_close(found[None], found["eager"])
    assert (sdpa - found["eager"]).abs().max() > 1e-3


def test_sdpa_is_refused_where_it_drops_a_soft_cap(gemma2: str) -> None:
    with pytest.raises(ConfigError, match="soft-cap"):
        model.load_student(gemma2, dtype="float32", attention="sdpa", gradient_checkpointing=False)


def saved(folder: Path, family: str, **changes: Any) -> str:
    """A random model of a family, in a folder; without a tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **heads, **experts, lru_width=32, pad_token_id=0, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("phi", {}),  # a head with a bias
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("recurrent_gemma", {"logits_soft_cap": 3.0}),
        ("mixtral", {"output_router_logits": True}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
        ("opt", {}),  # a decoder within its base model
        ("gpt2", {}),
    ],
)
def test_families_whose_head_is_known_are_loaded(
    tmp_path: Path, family: str, changes: dict[str, Any], dtype: str
) -> None:
    path = saved(tmp_path, family, **changes)
    student = model.load_student(path, dtype=dtype, attention=None, gradient_checkpointing=False)
    ids = torch.arange(1, 6)[None]
    with torch.no_grad():
        own = student.lm(ids, use_cache=False).logits[0].float()
        states = student(ids, torch.ones_like(ids), torch.zeros_like(ids[0]), torch.arange(5))
        torch.testing.assert_close(student.head().logits(states), own, rtol=0.02, atol=0.02 * own.abs().max().item())


def test_a_model_with_a_layer_between_its_states_and_its_head_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "modernbert-decoder")
    with pytest.raises(ConfigError, match=r"ModernBertDecoderForCausalLM.* other logits"):
        model.load_student(path, dtype="float32", attention=None, gradient_checkpointing=False)


@pytest.mark.parametrize("unknown", [(1.0, 0.0), (0.9, 30.0)])
def test_a_model_whose_soft_cap_or_scale_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: tuple[float, float]
) -> None:
    """Logits of a random model are small: at those that it really gives the cap does not show."""
    monkeypatch.setattr(model, "scale_and_cap", lambda config: unknown)
    with pytest.raises(ConfigError, match="logits differ from head"):
        model.load_student(saved(tmp_path, "gemma2"), dtype="float32", attention=None, gradient_checkpointing=False)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_generation_config_that_transformers_refuses_to_write_is_saved_as_it_came(
    world: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    """As Vicuna's: a temperature without do_sample, on which the first checkpoint failed."""
    folder = shutil.copytree(world / "student", tmp_path / "model")
    flags = {"eos_token_id": 1, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(flags))
    student = model.load_student(str(folder), dtype="float32", attention=None, gradient_checkpointing=False, lora=lora)
    for part in model_parts("saved", student, model.load_tokenizer(str(folder)), ALONE):
        part.write(tmp_path)
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: saved[name] for name in flags} == flags and "do_sample" not in saved


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "qwen3_next", "mistral", "gemma3_text", "gpt2", "opt", "falcon_h1"]
)
def test_padding_on_the_right_needs_no_mask(family: str) -> None:
    """Hidden states and gradients at the tokens that are read are those that the mask gives."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    named = {"n_embd": 32, "n_layer": 2, "n_head": 4, "ffn_dim": 32, "word_embed_proj_dim": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "mamba_d_ssm": 32}
    state = {"linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    config = AutoConfig.for_model(
        family, **shape, **heads, **experts, **named, **linear, **state, attn_implementation="sdpa"
    )
    lm = AutoModelForCausalLM.from_config(config).train()
    student = model.Student(lm)
    lengths = torch.tensor([5, 16, 9])
    ids = torch.randint(1, 64, (3, 16)) * (torch.arange(16) < lengths[:, None])
    row, source = (torch.arange(16) < lengths[:, None]).nonzero(as_tuple=True)
    # Dropout, where a family has it, must fall alike.
    found = []
    for attention in ("sdpa", "masked"):
        torch.manual_seed(1)
        lm.zero_grad()
        mask = (torch.arange(16) < lengths[:, None]).long()
        if attention == "sdpa":
            hidden = student(ids, mask, row, source)
        else:
            hidden = lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[row, source]
        hidden.pow(2).sum().backward()
        found.append([hidden.detach(), *[p.grad for p in lm.base_model.parameters() if p.grad is not None]])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_a_hub_that_cannot_be_reached_is_not_taken_for_a_model_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot the network may come late: a supervisor must start the job again."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", 1)
    options: dict[str, Any] = {"dtype": "float32", "attention": None, "gradient_checkpointing": False}
    for load in (lambda: model.load_tokenizer("a/b"), lambda: model.load_student("a/b", **options)):
        with pytest.raises(UnavailableError, match="'a/b'"):
            load()
        with monkeypatch.context() as offline, pytest.raises(ConfigError, match="'a/b'"):
            offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            load()
