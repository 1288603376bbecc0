"""A model loses the layers that it misses least, and what is saved computes what was measured."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opd.errors import ConfigError
from opd.pretrained import read_causal_lm, read_config
from opd_lab.tiny.tokenizer import make_tokenizer
from student.commands.prune import prune

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"vocab_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3}


def made(folder: Path, family: str = "llama", **changes: object) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | ends | changes))
    idle = model.model.layers[2]  # adds next to nothing
    for part in (idle.self_attn.o_proj, idle.mlp.down_proj):
        torch.nn.init.normal_(part.weight, std=1e-4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(4)))
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read_causal_lm(folder, config=read_config(folder), dtype="auto").eval()(torch.arange(8)[None]).logits


def test_the_layer_that_is_missed_least_goes_first_and_the_curve_rises(tmp_path: Path) -> None:
    model, seen = made(tmp_path / "whole"), list[tuple[int, float]]()
    gone = prune(
        str(model),
        tmp_path / "out",
        layers=2,
        prompts=model / "prompts.jsonl",
        told=lambda layer, kl: seen.append((layer, kl)),
    )
    assert gone == seen and gone[0][0] == 2 and len(gone) == 2
    assert 0 <= seen[0][1] < 1e-3 < seen[1][1]
    assert read_config(tmp_path / "out").num_hidden_layers == 2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4}),
    ],
)
def test_a_layer_that_adds_nothing_can_go_in_every_kind_of_stack(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model = made(tmp_path / "whole", family, **changes)
    prune(str(model), tmp_path / "out", drop=[2])
    tied = family == "gemma3_text"  # its norms after the layer make much of little
    assert tied or torch.allclose(logits(tmp_path / "out"), logits(model), atol=0.05)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop": [4]}, r"has layers 0 to 3; layers \[4\] cannot be dropped"),
        ({"drop": [0, 1, 2, 3]}, "cannot be dropped"),
        ({"layers": 4}, "has 4 layers, so 4 cannot be kept"),
        ({"layers": 3}, "name a file of them with --prompts"),
    ],
)
def test_what_cannot_be_left_out_is_refused(given: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        prune(str(made(tmp_path / "whole")), tmp_path / "out", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
