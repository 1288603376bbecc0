"""Makes a tokenizer of 256 bytes and four special tokens: lossless on any text, with one token per ASCII character.

A second one, of any size, also has words of up to four letters, for models with a vocabulary of realistic size.
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
"""Each role is marked by one token; system messages are treated like the user's."""


def make_tokenizer(max_length: int = 512, *, shuffled: bool = False) -> PreTrainedTokenizerFast:
    """Make the tokenizer of tiny worlds: ids 0 to 3 are pad, end, user and assistant, followed by the 256 bytes.

    It is a byte-level BPE like those of Qwen and Llama, but without merges, and has a chat template.

    Args:
        max_length: maximum length of a sequence in tokens.
        shuffled: number the bytes in reverse order, which gives a tokenizer of the same size that does not go with the
            other models.
    """
    return _tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=shuffled), [], max_length)


_SPECIALS = [PAD, END, USER, ASSISTANT]


def make_word_tokenizer(size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of `size` ids: those of `make_tokenizer`, then words with a leading space, shorter ones first.

    A sequence of words is encoded to the same ids that it was decoded from, so that random answers keep their length.

    Args:
        size: total number of ids.
        max_length: maximum length of a sequence in tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    every = ("Ġ" + "".join(letters) for length in range(1, 5) for letters in product(ascii_letters, repeat=length))
    words = list(islice(every, size - len(_SPECIALS) - len(alphabet)))
    # Each word is a merge of a word one letter shorter, which precedes it, and its last letter.
    return _tokenizer(alphabet + words, [(word[:-1], word[-1]) for word in words], max_length)


def _tokenizer(pieces: list[str], merges: list[tuple[str, str]], max_length: int) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer whose ids are the special tokens, then `pieces`."""
    specials = _SPECIALS
    vocabulary = {token: index for index, token in enumerate(specials + pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Without merges there is no need to split text into words first.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        # transformers loads the tokenizer of any Qwen2 model as Qwen's class, which would add a token for unknown text.
        unk_token=END if merges else None,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
