"""One prompt: what the student is asked, what is known about the answer, and who teaches it."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opd.errors import DataError

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with all that travels with it; make one with `Prompt.make`.

    Attributes:
        uid: 16 hex digits, a hash of content, answer, teacher and domain: equal in every process and run.
        content_hash: 64-bit hash of the content alone; splits are cut by it, so that equal text never crosses them.
        text: raw text, or None when `messages` is given.
        messages: chat messages with "role" and "content", or None when `text` is given.
        answer: the reference answer, for the verifier.
        teacher: name of the teacher that scores answers to this prompt; None leaves it to the routes.
        domain: a label that metrics and routes group by.
        extra: whatever the source wants to keep, for example operands or a worked solution.
    """

    uid: str
    content_hash: int
    text: str | None
    messages: tuple[Message, ...] | None
    answer: str | None = None
    teacher: str | None = None
    domain: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        content: str | Sequence[Message],
        *,
        answer: str | None = None,
        teacher: str | None = None,
        domain: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> "Prompt":
        """A prompt from text or chat messages.

        Raises:
            DataError: when the content is empty or neither text nor messages, a message lacks a textual "role" or
                "content", or a text holds half of a surrogate pair, which no tokenizer encodes.
        """
        text, messages = _parse(content)
        key = json.dumps(text if messages is None else messages, ensure_ascii=False, sort_keys=True)
        labels = json.dumps([answer, teacher, domain], ensure_ascii=False)
        return cls(
            uid=_digest(f"{key}\n{labels}"),
            content_hash=int(_digest(key), 16),
            text=text,
            messages=messages,
            answer=answer,
            teacher=teacher,
            domain=domain,
            extra=extra or {},
        )

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages that needs a chat template."""
        return self.messages is not None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _parse(content: str | Sequence[Message]) -> tuple[str | None, tuple[Message, ...] | None]:
    if isinstance(content, str):
        if not content:
            raise DataError("a prompt is an empty string; remove it or give it text.")
        return _whole(content), None
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise DataError(f"a prompt is {str(content)[:80]!r}, which is neither text nor a list of chat messages.")
    messages = []
    for position, message in enumerate(content):
        role, body = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(body, str):
            raise DataError(
                f"chat message {position} of a prompt is {message!r}; it needs a text for 'role' and for 'content'."
            )
        messages.append({"role": role, "content": _whole(body)})
    if not messages:
        raise DataError("a prompt is an empty list of chat messages; remove it or give it a message.")
    return None, tuple(messages)


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a prompt holds half of a surrogate pair at character {error.start}; remove it.") from error
    return text
