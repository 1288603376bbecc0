"""Tokenizers that transformers reads otherwise than their files say."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from opd.tokenizer_files import lacks_bos, read_otherwise
from opd_lab.tiny.tokenizer import make_tokenizer


def _beginning(bos: str | None, *, template: str | None = None, adds: bool = False) -> Any:
    """A tokenizer with a BOS token, which it may put before texts or write in its chat template."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template, tokenizer.add_bos_token = bos, template, adds
    return tokenizer


def test_a_bos_token_that_the_model_has_and_no_text_gets_is_told() -> None:
    tokenizer = _beginning("1")
    bos = tokenizer.bos_token_id
    for config in ({"bos_token_id": bos}, {"text_config": {"bos_token_id": bos}}):
        assert "puts no 1 before a text" in str(lacks_bos(tokenizer, config))
    # A template that writes it does not help plain prompts.
    assert lacks_bos(_beginning("1", template="{{ bos_token }}"), {"bos_token_id": bos}) is not None


def test_models_that_begin_no_text_with_bos_are_not_told_of() -> None:
    for tokenizer in (
        _beginning("1", adds=True),
        _beginning("1", template="{{ '1user' }}"),
        _beginning(make_tokenizer().eos_token),
        _beginning(make_tokenizer().pad_token),
        _beginning(None),
    ):
        assert lacks_bos(tokenizer, {"bos_token_id": tokenizer.convert_tokens_to_ids("1")}) is None
        assert lacks_bos(tokenizer, {"bos_token_id": tokenizer.bos_token_id}) is None
        assert lacks_bos(tokenizer, {}) is None


def _loaded(folder: Path, config: PreTrainedConfig) -> Any:
    """A byte-level tokenizer with a merged pair of digits, read back beside the config of a model."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "</s>"]
    own = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[("1", "2")]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>").save_pretrained(folder)
    config.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_tokenizer_that_the_architecture_replaces_is_named(tmp_path: Path) -> None:
    said = read_otherwise(_loaded(tmp_path, Qwen2Config()), tmp_path)
    assert said is not None and "loaded as Qwen2Tokenizer of 259 ids" in said and "tokenizer.json of 258 ids" in said


def test_a_tokenizer_that_is_read_as_it_was_saved_is_not(tmp_path: Path) -> None:
    tokenizer = _loaded(tmp_path, LlamaConfig())
    assert read_otherwise(tokenizer, tmp_path) is None
    (tmp_path / "tokenizer.json").unlink()
    assert read_otherwise(tokenizer, tmp_path) is None


def test_the_student_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from student.model.model import load_tokenizer

    _loaded(tmp_path, Qwen2Config())
    load_tokenizer(str(tmp_path))
    assert "splits text differently" in caplog.text


def test_padding_and_truncation_that_were_saved_are_no_other_way_to_split(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own.enable_padding(length=64)
    own.enable_truncation(8)
    own.save(str(tmp_path / "tokenizer.json"))
    assert read_otherwise(tokenizer, tmp_path) is None
