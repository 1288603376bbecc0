"""Loading the student."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from opd.errors import ConfigError
from student.learning import model


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
