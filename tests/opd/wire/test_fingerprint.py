"""Hashes of tokenizers, weights and heads: equal for equal content, different for any difference."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from opd.errors import ConfigError
from opd.wire.fingerprint import chat_template_hash, head_hash, tokenizer_fingerprint, weights_hash
from opd.wire.types import Head


def byte_level(extra: dict[str, int] | None = None) -> Tokenizer:
    vocab = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, **(extra or {})}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_level(vocab: dict[str, int]) -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab=vocab, unk_token=next(iter(vocab))))


def test_equal_tokenizers_have_equal_fingerprints() -> None:
    assert tokenizer_fingerprint(byte_level()) == tokenizer_fingerprint(byte_level())


def test_the_fingerprint_speaks_of_bytes_not_of_spelling() -> None:
    plain = word_level({"a": 0, "b": 1, " ": 2, "ab": 3})
    assert tokenizer_fingerprint(byte_level()) == tokenizer_fingerprint(plain)


def test_sentencepiece_spelling_is_mapped_to_bytes() -> None:
    pieces = word_level({"a": 0, "▁a": 1, "<0x0A>": 2})
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    assert tokenizer_fingerprint(pieces) == tokenizer_fingerprint(word_level({"a": 0, " a": 1, "\n": 2}))


@pytest.mark.parametrize("change", ["swap", "extra", "special", "added"])
def test_any_difference_changes_the_fingerprint(change: str) -> None:
    base = byte_level()
    other = byte_level({"c": 4}) if change == "extra" else byte_level()
    if change == "swap":
        other = word_level({"b": 0, "a": 1, " ": 2, "ab": 3})
    if change in ("special", "added"):
        other.add_tokens([AddedToken("<end>", special=False)])
    if change == "special":
        base.add_tokens([AddedToken("<end>", special=False)])
        other = byte_level()
        other.add_special_tokens([AddedToken("<end>", special=True)])
    assert tokenizer_fingerprint(base) != tokenizer_fingerprint(other)


def test_a_transformers_tokenizer_agrees_with_its_backend(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = byte_level()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert tokenizer_fingerprint(wrapped) == tokenizer_fingerprint(backend)
    assert chat_template_hash(wrapped) == ""
    wrapped.chat_template = "{{ messages }}"
    assert len(chat_template_hash(wrapped)) == 64
    wrapped.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(wrapped)
    assert chat_template_hash(again) == chat_template_hash(wrapped)


def test_weights_hash_does_not_depend_on_sharding_but_on_every_bit(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for folder in (one, two, other):
        folder.mkdir()
    save_file({"a": a, "b": b}, one / "model.safetensors")
    save_file({"b": b}, two / "model-1.safetensors")
    save_file({"a": a}, two / "model-2.safetensors")
    flipped = a.clone()
    flipped[1, 2] += 1e-6
    save_file({"a": flipped, "b": b}, other / "model.safetensors")
    assert weights_hash(one) == weights_hash(two) == weights_hash({"b": b, "a": a})
    assert weights_hash(one) == weights_hash(one / "model.safetensors")
    assert weights_hash(other) != weights_hash(one)
    assert weights_hash({"a": a.reshape(3, 2), "b": b}) != weights_hash(one)


def test_missing_or_damaged_weights_are_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        weights_hash(tmp_path)
    save_file({"a": torch.ones(64)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    other = struct.pack("<Q", 2) + b"[]"  # JSON, but not a header
    for damaged in (data[:4], data[:40], data[:-8], other):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            weights_hash(tmp_path)


def test_head_hash_covers_weight_bias_scale_and_soft_cap() -> None:
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)

    def digest(
        weight: np.ndarray = weight, bias: np.ndarray | None = None, scale: float = 1.0, cap: float = 0.0
    ) -> str:
        return head_hash(Head(weight, bias, "f32", scale, cap, ""))

    hashes = [
        digest(),
        digest(weight + 1),
        digest(weight.reshape(3, 4)),
        digest(bias=np.zeros(4, np.float32)),
        digest(scale=0.5),
        digest(cap=30.0),
    ]
    assert len(set(hashes)) == len(hashes)
    assert digest(weight.copy()) == hashes[0]
