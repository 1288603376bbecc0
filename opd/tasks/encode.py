"""From a prompt to the token ids that the student continues."""

from typing import Any

from opd.errors import DataError
from opd.tasks.prompt import Prompt


def encode_prompt(prompt: Prompt, tokenizer: Any, **template_options: Any) -> list[int]:
    """Token ids of a prompt, ready to be continued.

    Text is encoded with the tokenizer's own special tokens (a leading BOS, say); chat messages go through its chat
    template up to the opening of the assistant's turn.

    Args:
        prompt: what to encode.
        tokenizer: a Hugging Face tokenizer.
        template_options: passed on to the chat template, for example `enable_thinking=False`.

    Returns:
        [P] ids, P >= 1.

    Raises:
        DataError: when a chat prompt meets a tokenizer without a chat template or one that refuses it, or nothing is
            left to encode.
    """
    from jinja2 import TemplateError

    if prompt.messages is None:
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"prompt {prompt.uid} is a list of chat messages, but tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; use plain text prompts or a tokenizer with a template."
            )
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template_options,
            )
        except TemplateError as error:
            raise DataError(
                f"the chat template of tokenizer {tokenizer.name_or_path!r} refuses prompt {prompt.uid}, whose roles "
                f"are {', '.join(message['role'] for message in prompt.messages)}: {error}; change the messages."
            ) from error
    if not ids:
        raise DataError(f"prompt {prompt.uid} encodes to no token at all; remove it or give it text.")
    return [int(token) for token in ids]
