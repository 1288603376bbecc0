"""A prompt: what the student is asked, what is known about the answer, and who teaches it."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opd.errors import DataError, short
from opd.tasks.messages import Message, read_messages, read_tools, whole

_encoder = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with everything that belongs to it; create one with `Prompt.make`.

    Attributes:
        uid: 16 hex digits, a hash of what follows except `extra` and `place`; the same in every process and run.
        content_hash: 64-bit hash of text or messages, without `system`. Splits are made by it, so that equal texts are
            always on the same side.
        text: plain text; None if `messages` is given.
        messages: chat messages, including the system message, see `opd.tasks.messages`; None if `text` is given.
        answer: the reference answer, for the verifier.
        teacher: name of the teacher that scores answers to this prompt; None leaves it to the routes.
        domain: a label by which metrics and routes group prompts.
        extra: whatever the source keeps, for example operands or a worked solution.
        template_options: further arguments for the chat template, for example enable_thinking.
        place: file and line where the prompt was read, for messages.
        max_new_tokens: longest response to this prompt in tokens, if shorter than the run's; None for the run's.
        tools: JSON schemas of the tools that the chat template describes.
    """

    uid: str
    content_hash: int
    text: str | None
    messages: tuple[Message, ...] | None
    answer: str | None = None
    teacher: str | None = None
    domain: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)
    max_new_tokens: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def make(
        cls,
        content: str | Sequence[Message],
        *,
        answer: str | None = None,
        teacher: str | None = None,
        domain: str | None = None,
        extra: Mapping[str, Any] | None = None,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Any = None,
        place: str = "",
    ) -> "Prompt":
        """A prompt from text or chat messages.

        A `system` message is put before messages that do not begin with one. Tools may be JSON text. The other
        arguments are those of the class.

        Raises:
            DataError: if the content is empty or neither text nor messages, a message lacks a textual "role" or
                "content", plain text is given a system message, template options or tools, or a text contains half of
                a surrogate pair, which no tokenizer encodes.
        """
        text, messages = _parse(content)
        named = {"answer": answer, "teacher": teacher, "domain": domain}
        # Taken before the system message is added: splits go by the problem, whatever precedes it.
        key = _encoder.encode(text if messages is None else messages)
        labels: list[Any] = [None if label is None else whole(label, what) for what, label in named.items()]
        # Only if they are set, so that prompts without them keep the uid from before these keys existed.
        if system is not None or template_options:
            labels += [system, dict(template_options or {})]
        described = read_tools(tools)
        if described:
            labels.append({"tools": described})
        if messages is None and (template_options or described):
            what = f"template_options {dict(template_options)}" if template_options else f"tools {short(described)}"
            raise DataError(
                f"{what} have no effect on a prompt of plain text; set chat: true, so that the text becomes the user's "
                "message, or leave them out."
            )
        if system is not None:
            messages = _with_system(messages, system)
        return cls(
            uid=_digest(f"{key}\n{_list(labels)}"),
            content_hash=int(_digest(key), 16),
            text=text,
            messages=messages,
            answer=answer,
            teacher=teacher,
            domain=domain,
            extra=extra or {},
            template_options=template_options or {},
            place=place,
            tools=described,
        )

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> "Prompt":
        """The prompt whose fields are `values`, as read back from JSON; fields that are newer than it are empty."""
        lists = {name: tuple(held) for name in ("messages", "tools") if (held := values.get(name)) is not None}
        return cls(**{**values, **lists})

    @property
    def name(self) -> str:
        """What messages call the prompt: where it was read, else its uid."""
        return f"prompt {self.uid}" if not self.place else f"the prompt in {self.place}"

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages that needs a chat template."""
        return self.messages is not None


def _list(values: Sequence[Any]) -> str:
    """The values as a JSON list; encoding them one by one takes a third of the time for texts."""
    return f"[{', '.join('null' if value is None else _encoder.encode(value) for value in values)}]"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _parse(content: str | Sequence[Message]) -> tuple[str | None, tuple[Message, ...] | None]:
    if isinstance(content, str):
        if not content:
            raise DataError("a prompt is an empty string; remove it or give it text.")
        return whole(content), None
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise DataError(f"a prompt is {str(content)[:80]!r}, which is neither text nor a list of chat messages.")
    return None, read_messages(content)


def _with_system(messages: tuple[Message, ...] | None, system: str) -> tuple[Message, ...]:
    if messages is None:
        raise DataError(
            "a system message cannot be put before a prompt of plain text; set chat: true, so that the text becomes "
            "the user's message, or leave out system."
        )
    if messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": whole(system)}, *messages)
