"""Chat messages and tools as a prompt keeps them: whole, in one form however a file stores them.

A message keeps all of its keys (tool_calls, tool_call_id, name, reasoning_content, ...), for the chat template to read.
Nulls are left out at any depth, because in parquet every message has the keys of all. Text parts of content are joined,
and tool calls, their arguments and tools may be JSON text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opd.errors import DataError, short

Message = Mapping[str, Any]
"""A chat message; "role" and "content" are texts, further keys are JSON values."""

_TEXT_PARTS = (None, "text", "input_text", "output_text")


def read_messages(content: Iterable[Any]) -> tuple[Message, ...]:
    """The messages of a chat.

    Raises:
        DataError: if there are none, or one lacks a textual role or content (which may be empty beside tool calls).
    """
    messages = tuple(_message(position, message) for position, message in enumerate(content))
    if not messages:
        raise DataError("a prompt is an empty list of chat messages; remove it or give it a message.")
    return messages


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tools as JSON schemas; none if `value` is empty.

    Raises:
        DataError: if they are not a list of objects, or JSON text of it.
    """
    found = _parsed(value)
    tools = [_parsed(tool) for tool in found] if isinstance(found, list | tuple) else found or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"tools are {short(value)}, which is not a list of JSON schemas; correct them, or set prompts.tools_column "
            "to null if the column means something else."
        )
    return tuple(_kept(tool) for tool in tools)


def stored_messages(text: str) -> Any:
    """The chat messages of which `text` is the JSON text; `text` itself if it is something else."""
    if not text.lstrip().startswith("["):
        return text
    found = _parsed(text)
    chat = isinstance(found, list) and found and all(isinstance(one, Mapping) and "role" in one for one in found)
    return found if chat else text


def message_text(message: Message) -> str:
    """What a message says, for those who read it without the chat template: its content, and its tool calls as JSON."""
    calls = message.get("tool_calls")
    parts = (message["content"], json.dumps(calls, ensure_ascii=False) if calls else "")
    return "\n".join(part for part in parts if part)


def whole(text: str, what: str = "") -> str:
    """`text` itself.

    Raises:
        DataError: if it contains half of a surrogate pair, which no tokenizer encodes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the {what} of a prompt" if what else "a prompt"
        raise DataError(
            f"{where} holds half a surrogate pair at character {error.start}, which is not valid Unicode; remove it."
        ) from error
    return text


def _message(position: int, message: Any) -> Message:
    found = _kept(message) if isinstance(message, Mapping) else {}
    calls = _calls(position, found.pop("tool_calls", None))
    role, body = found.get("role"), _joined(found.get("content", "" if calls else None))
    if not isinstance(role, str) or not isinstance(body, str):
        raise DataError(
            f"chat message {position} of a prompt is {short(message)}; it needs a text for 'role', and for 'content' a "
            "text or a list of parts that are texts."
        )
    return {**found, "role": role, "content": whole(body), **({"tool_calls": calls} if calls else {})}


def _calls(position: int, value: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which templates expect; they are often stored as JSON text."""
    calls = _parsed(value) or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"chat message {position} of a prompt has the tool_calls {short(value)}; give a list of calls.")
    found = []
    for call in calls:
        inner = call.get("function")
        function = _with_arguments(inner) if isinstance(inner, Mapping) else inner
        found.append({**_with_arguments(call), **({"function": function} if function is not None else {})})
    return found


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _parsed(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else dict(call)


def _joined(content: Any) -> Any:
    """Content whose parts are all texts as one text, as templates write such parts; other content as it is."""
    if not isinstance(content, list):
        return content
    texts = [
        part if isinstance(part, str) else part.get("text") if part.get("type") in _TEXT_PARTS else None
        for part in content
        if isinstance(part, str | Mapping)
    ]
    known = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if known else content


def _parsed(value: Any) -> Any:
    """What `value` is the JSON text of; itself if it is not."""
    if not isinstance(value, str):
        return value
    try:
        return _kept(json.loads(value))
    except (ValueError, RecursionError):
        return value


def _kept(value: Any) -> Any:
    """A value as JSON without the keys that are null, as parquet fills them in."""
    if isinstance(value, Mapping):
        return {whole(str(key)): _kept(held) for key, held in value.items() if held is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_kept(held) for held in value]
    if isinstance(value, str):
        return whole(value)
    return value if value is None or isinstance(value, int | float) else str(value)
