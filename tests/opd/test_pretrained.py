"""A model has every tensor from its files, and they have none that it would use and leaves out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from opd.errors import ConfigError
from opd.pretrained import check_ids, check_tensors, read_causal_lm, read_config, read_tokenizer

Tensors = dict[str, Tensor]
_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
_SIZES |= {"vocab_size": 64, "num_key_value_heads": 1, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(family, **config) -> folder of a random model; a fresh copy each time."""
    made: dict[str, Path] = {}

    def one(family: str = "llama", **changes: Any) -> Path:
        key = json.dumps([family, changes])
        if key not in made:
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **_SIZES | _EXPERTS | changes)
            made[key] = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(config).save_pretrained(made[key])
        return Path(shutil.copytree(made[key], tmp_path_factory.mktemp("copy") / "model"))

    return one


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def without(folder: Path, part: str) -> Path:
    return edit(folder, lambda tensors: {name: t for name, t in tensors.items() if part not in name})


def plus(folder: Path, name: str, *shape: int) -> Path:
    return edit(folder, lambda tensors: tensors | {name: torch.ones(shape)})


def renamed(folder: Path, change: Callable[[str], str]) -> Path:
    return edit(folder, lambda tensors: {change(name): t for name, t in tensors.items()})


def configure(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def load(folder: Path) -> Any:
    return read_causal_lm(folder, config=read_config(folder), dtype=torch.float32)


def heads(folder: Path) -> None:
    check_tensors(folder, read_config(folder))


REFUSED: dict[str, tuple[Callable[[Callable[..., Path]], Path], str]] = {
    "no head": (lambda make: without(make(), "lm_head"), "missing keys: lm_head.weight"),
    "no norm": (lambda make: without(make(), "model.norm"), "missing keys: model.norm.weight"),
    "a layer too few": (lambda make: configure(make(), num_hidden_layers=3), r"missing keys: model\.layers\.2\."),
    "a layer too many": (lambda make: configure(make(), num_hidden_layers=1), r"unexpected keys: model\.layers\.1\."),
    "fewer rows": (lambda make: configure(make(), vocab_size=65), r"mismatched keys: lm_head.weight of \[64, 32\]"),
    "fewer positions": (lambda make: configure(make("gpt2"), n_positions=48), r"mismatched keys: \S*wpe"),
    "an expert lost": (lambda make: without(make("mixtral"), ".experts.1."), "mismatched keys: .*experts"),
    "a bias that the config leaves out": (lambda make: plus(make(), f"{Q}.bias", 32), rf"unexpected keys: {Q}\.bias"),
    "norms that the config leaves out": (
        lambda make: plus(make(), f"{Q[:-6]}q_norm.weight", 16),
        "unexpected .*q_norm",
    ),
    "the bias of a head": (lambda make: plus(make(), "lm_head.bias", 64), r"unexpected keys: lm_head\.bias"),
    "saved from DDP": (lambda make: renamed(make(), "module.{}".format), r"'module\.' .*save_file"),
    "saved compiled": (lambda make: renamed(make(), "_orig_mod.{}".format), r"'_orig_mod\.' .*save_file"),
    "saved with one layer compiled": (
        lambda make: renamed(make(), lambda name: name.replace("layers.0.", "layers.0._orig_mod.")),
        r"'_orig_mod\.' .*save_file",
    ),
    "saved within something of the user's": (lambda make: renamed(make(), "actor.lm.{}".format), r"'actor\.lm\.'"),
}


@pytest.mark.parametrize("read", [load, heads])
@pytest.mark.parametrize("case", REFUSED)
def test_files_with_other_tensors_than_the_config_calls_for_are_refused(
    make: Callable[..., Path], case: str, read: Callable[[Path], Any]
) -> None:
    build, said = REFUSED[case]
    folder = build(make)
    with pytest.raises(ConfigError, match=said):
        read(folder)


def test_what_the_refusal_of_a_wrapper_says_to_do_helps(make: Callable[..., Path]) -> None:
    folder = renamed(make(), "module.{}".format)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    code = str(caught.value).partition("safetensors.torch: ")[2].removesuffix(".")
    eval(code, {"F": folder / "model.safetensors", "save_file": save_file, "load_file": load_file})
    load(folder)


def _base_alone(make: Callable[..., Path]) -> Path:
    folder = make("gpt2")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    return folder


ACCEPTED: dict[str, Callable[[Callable[..., Path]], Path]] = {
    "a tied head that is not in the file": lambda make: make(tie_word_embeddings=True),
    "a tied config with a head in the file": lambda make: configure(make(), tie_word_embeddings=True),
    "the base model alone, whose head is tied": _base_alone,
    "a mask that older versions saved": lambda make: plus(make("gpt2"), "transformer.h.0.attn.bias", 1, 1, 4, 4),
    "frequencies that older versions saved": lambda make: plus(make(), f"{Q[:-6]}rotary_emb.inv_freq", 8),
    "a head of another task": lambda make: plus(make(), "v_head.summary.weight", 1, 32),
    "a tower beside the model": lambda make: plus(make(), "visual.blocks.0.weight", 2),
    "layers for predicting several tokens": lambda make: configure(
        plus(make(), "model.layers.2.eh_proj.weight", 2), num_nextn_predict_layers=1
    ),
    "experts": lambda make: make("mixtral"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_right_is_loaded(make: Callable[..., Path], case: str) -> None:
    folder = ACCEPTED[case](make)
    heads(folder)
    load(folder)


def test_a_pickle_that_would_run_code_is_refused_in_a_sentence(make: Callable[..., Path]) -> None:
    folder = make()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    heads(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)


@pytest.mark.parametrize("change", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"model_type": "nothing"}])
def test_a_config_that_makes_no_model_is_refused_in_a_sentence(
    make: Callable[..., Path], change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(configure(make(), **change))


@pytest.fixture
def named(world: Path, tmp_path: Path) -> Path:
    """A student of the world with its tokenizer."""
    return Path(shutil.copytree(world / "student", tmp_path / "model"))


@pytest.mark.parametrize("text", ["{}", "{" * 100_000, "[" * 100_000, ""])
def test_a_damaged_tokenizer_is_refused_in_a_sentence(named: Path, text: str) -> None:
    (named / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="the tokenizer of model"):
        read_tokenizer(named)


def test_a_folder_without_a_tokenizer_is_said_to_have_none(named: Path) -> None:
    for file in named.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer; copy"):
        read_tokenizer(named)


def test_a_token_without_an_embedding_is_named(named: Path) -> None:
    tokenizer = read_tokenizer(named)
    check_ids(tokenizer, named)
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(ConfigError, match="'<extra>' of id"):
        check_ids(tokenizer, named)
