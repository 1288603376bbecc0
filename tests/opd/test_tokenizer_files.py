"""Tokenizers that transformers reads otherwise than their files say."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from opd.tokenizer_files import read_otherwise
from opd_lab.tiny.tokenizer import make_tokenizer


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
