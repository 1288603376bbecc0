"""A tokenizer of 256 bytes and four special tokens: lossless on any text, one token per character of ASCII.

Another of any size has words of up to four letters besides, for models whose vocabulary is to have its real size.
"""

from itertools import islice, product
from string import ascii_letters

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Roles are marked by one token each; system messages read like the user's."""


def make_tokenizer(max_length: int = 512, *, shuffled: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny world: ids 0..3 are pad, end, user and assistant, then the 256 bytes.

    It is a byte-level BPE without merges, the form of Qwen's and Llama's tokenizers, with a chat template.

    Args:
        max_length: longest sequence in tokens.
        shuffled: number the bytes in the opposite order: a tokenizer of equal size that fits no other model.
    """
    return _tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=shuffled), [], max_length)


_SPECIALS = [PAD, END, USER, ASSISTANT]


def make_word_tokenizer(size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` ids: those of `make_tokenizer`, then words with a space before them, shorter ones first.

    Words that follow each other are read back as the same ids, so that random answers keep their length as text.

    Args:
        size: ids in all.
        max_length: longest sequence in tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    every = ("Ġ" + "".join(letters) for length in range(1, 5) for letters in product(ascii_letters, repeat=length))
    words = list(islice(every, size - len(_SPECIALS) - len(alphabet)))
    # The shorter words that a word grows from stand before it.
    return _tokenizer(alphabet + words, [(word[:-1], word[-1]) for word in words], max_length)


def _tokenizer(pieces: list[str], merges: list[tuple[str, str]], max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the special tokens, then `pieces`."""
    specials = _SPECIALS
    vocabulary = {token: index for index, token in enumerate(specials + pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Without merges nothing is gained by looking for words first.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        # transformers reads the tokenizer of any Qwen2 model as Qwen's own, which would add a token for unknown text.
        unk_token=END if merges else None,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
