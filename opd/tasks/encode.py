"""Encoding prompts as the token ids that the student continues."""

from collections.abc import Callable, Sequence
from typing import Any

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd.tasks.template import rendered


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Token ids of plain text that is to be continued: after the special tokens that the tokenizer puts before a text.

    A text that already begins with the BOS token, as after a chat template, does not get a second one. Tokens that the
    tokenizer puts after a text, such as EOS or SEP, are left out, because nothing follows them in training.
    """
    return _encode_texts([text], tokenizer)[0]


def _encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    start = _start(next((text for text, ids in zip(texts, bare, strict=True) if ids), "x"), tokenizer)
    bos = getattr(tokenizer, "bos_token_id", None)
    found = [[int(token) for token in (*start, *ids)] for ids in bare]
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in found]


def _start(text: str, tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before every text, found with a text that has ids of its own."""
    whole, bare = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    places = range(len(whole) - len(bare) + 1)
    return list(whole[: next((i for i in places if whole[i : i + len(bare)] == bare), 0)])


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, ready to be continued.

    Text is encoded as by `encode_text`. Chat messages go through the chat template, with the prompt's
    `template_options`, up to the opening of the assistant's turn.

    Args:
        prompt: what to encode.
        tokenizer: a Hugging Face tokenizer.

    Returns:
        [P] ids, P >= 1.

    Raises:
        DataError: if the tokenizer of a chat prompt has no chat template, the template refuses the prompt or its
            options, or the prompt encodes to nothing.
    """
    return encode_prompts([prompt], tokenizer)[0]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, watch: Callable[[Prompt, str], None] = lambda prompt, text: None
) -> list[list[int]]:
    """Token ids of each prompt, as from `encode_prompt`.

    All go through the tokenizer in one call or two, which takes a third of the time if they are short.

    Args:
        prompts: what to encode.
        tokenizer: a Hugging Face tokenizer.
        watch: called with each chat prompt and the text that its chat template wrote.
    """
    plain = iter(_encode_texts([prompt.text or "" for prompt in prompts if prompt.messages is None], tokenizer))
    texts = []
    for prompt in prompts:
        if prompt.messages is not None:
            texts.append(rendered(prompt, tokenizer))
            watch(prompt, texts[-1])
    # The template has written the special tokens.
    chats = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
    return [_some(next(plain if prompt.messages is None else chats), prompt) for prompt in prompts]


def _some(ids: Sequence[int], prompt: Prompt) -> list[int]:
    if not ids:
        raise DataError(f"{prompt.name} encodes to no token at all; remove it or give it text.")
    return [int(token) for token in ids]
