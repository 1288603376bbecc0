"""A tokenizer of 256 bytes and four special tokens: lossless on any text, one token per character of ASCII."""

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
    specials = [PAD, END, USER, ASSISTANT]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=shuffled)
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
