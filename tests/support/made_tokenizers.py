"""Tokenizers of every kind, made on the spot from a few texts."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "the quick brown fox jumps over the lazy dog. 12345 naïve Zoë 李雷 💥 def f(x):\n\treturn x\r\n" * 3,
    "Hello world, hello there, it's a test of the tests and of nothing else. " * 5,
    "one\n\n\ntwo\n\n\nthree\n\n" * 9,
]


def _wrapped(backend: Any, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False, **special
    )


def byte_level(size: int = 400, *, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in GPT-2, Qwen and Llama 3."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=["</s>", "<|note|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return _wrapped(backend)


def byte_fallback(size: int = 400, scheme: str = "always") -> PreTrainedTokenizerFast:
    """SentencePiece's BPE with a token for each byte, as in Llama 2, and Gemma with scheme "never"."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    made = json.loads(backend.to_str())
    made["added_tokens"] = [one for one in made["added_tokens"] if not one["content"].startswith("<0x")]
    return _wrapped(Tokenizer.from_str(json.dumps(made)), unk_token="<unk>")


def unigram(size: int = 120) -> PreTrainedTokenizerFast:
    """SentencePiece's Unigram without bytes: what it does not know is one unknown token."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=size, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return _wrapped(backend, unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's, which writes the inside of words with ## and drops spaces."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[UNK]", "</s>"]
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    return _wrapped(backend, unk_token="[UNK]")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "small byte-level": lambda: byte_level(290),
    "normalising": lambda: byte_level(350, normalizer=normalizers.NFC()),
    "byte-fallback": byte_fallback,
    "byte-fallback first": lambda: byte_fallback(380, "first"),
    "byte-fallback never": lambda: byte_fallback(390, "never"),
    "unigram": unigram,
}
