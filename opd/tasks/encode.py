"""Encoding prompts as the token ids that the student continues."""

from collections.abc import Sequence
from typing import Any

from opd.errors import DataError
from opd.tasks.prompt import Prompt


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
    ids = encode_text(prompt.text or "", tokenizer) if prompt.messages is None else _render(prompt, tokenizer)
    return _some(ids, prompt)


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt, as from `encode_prompt`.

    All plain texts go through the tokenizer in one call, which takes a third of the time if they are short.
    """
    plain = iter(_encode_texts([prompt.text or "" for prompt in prompts if prompt.messages is None], tokenizer))
    return [_some(next(plain) if prompt.messages is None else _render(prompt, tokenizer), prompt) for prompt in prompts]


def _some(ids: Sequence[int], prompt: Prompt) -> list[int]:
    if not ids:
        raise DataError(f"{prompt.name} encodes to no token at all; remove it or give it text.")
    return [int(token) for token in ids]


def _render(prompt: Prompt, tokenizer: Any) -> Any:
    from jinja2 import TemplateError

    messages = [dict(message) for message in prompt.messages or ()]
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{prompt.name} is a list of chat messages, but tokenizer {tokenizer.name_or_path!r} has no chat "
            "template; use plain text prompts or a tokenizer with a template."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **prompt.template_options
        )
    # Templates refuse with `raise_exception`; with options that they do not expect, they may fail in any of these ways.
    except TemplateError as error:
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} refuses {prompt.name}, whose roles are "
            f"{', '.join(message['role'] for message in messages)}: {error}; change the messages."
        ) from error
    except (TypeError, ValueError) as error:
        options = f" with template_options {dict(prompt.template_options)}" if prompt.template_options else ""
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} fails on {prompt.name}{options}: {error}."
        ) from error
