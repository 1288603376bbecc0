"""Loading the student."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from opd.errors import ConfigError
from student.learning import model
from student.learning.ranks import ALONE
from student.recipe import LoraSettings
from student.run.model_folder import model_parts


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
