"""Encoding prompts as the token ids that the student continues."""

from collections.abc import Sequence
from typing import Any

from opd.errors import DataError
from opd.tasks.prompt import Prompt


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Token ids of plain text, with the tokenizer's own special tokens.

    A text that already begins with the BOS token, as after a chat template, does not get a second one.
    """
    return _one_bos(tokenizer(text)["input_ids"], tokenizer)


def _one_bos(ids: Sequence[int], tokenizer: Any) -> list[int]:
    found = [int(token) for token in ids]
    bos = getattr(tokenizer, "bos_token_id", None)
    return found[1:] if bos is not None and found[:2] == [bos, bos] else found


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, ready to be continued.

    Text is encoded with the tokenizer's own special tokens (for example a leading BOS). Chat messages go through the
    chat template, with the prompt's `template_options`, up to the opening of the assistant's turn.

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
    texts = [prompt.text or "" for prompt in prompts if prompt.messages is None]
    plain = iter(tokenizer(texts)["input_ids"] if texts else ())
    return [
        _some(_one_bos(next(plain), tokenizer) if prompt.messages is None else _render(prompt, tokenizer), prompt)
        for prompt in prompts
    ]


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
