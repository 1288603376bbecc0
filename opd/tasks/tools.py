"""Tool calls in the formats that chat templates teach: Hermes and Qwen (JSON or XML in <tool_call>), Llama (bare JSON).

Replies are parsed leniently around calls and strictly within them: a call that is not valid becomes a message for the
model, never a guess. Calls inside closed thinking do not count. Text before, between and after calls is content, and
the calls are run all the same.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_THINKING = re.compile(r"^.*?</think>", re.DOTALL)
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"
_CALL_START = re.compile(r'\{\s*"(name|type)"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments|function)"')
"""A JSON answer may also have a name; only an object that continues like a call is a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call.

    Attributes:
        name: name of the tool.
        arguments: the arguments by name.
        coerced: whether the arguments are texts that still need the types in the tool's schema (XML).
    """

    name: str
    arguments: Mapping[str, Any]
    coerced: bool = False


@dataclass(frozen=True, slots=True)
class BadCall:
    """Text that was meant as a call but is not valid.

    Attributes:
        reason: what is wrong, for the model.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A student's turn.

    Attributes:
        content: the text outside calls.
        calls: the calls, in order.
    """

    content: str
    calls: tuple[Call | BadCall, ...]


def parse_reply(text: str) -> Reply:
    """The calls in a reply, and its content.

    Args:
        text: the reply, including special tokens that mark calls, if the tokenizer has such.
    """
    visible = _THINKING.sub("", text, count=1)
    blocks = list(_BLOCK.finditer(visible))
    if blocks:
        content = _BLOCK.sub("", visible).strip()
        return Reply(content, tuple(_block(match[1], closed=match[2] != "") for match in blocks))
    bare = visible.strip()
    tagged = bare.startswith(_LLAMA_TAG)
    bare = bare.removeprefix(_LLAMA_TAG).strip()
    if tagged or _CALL_START.match(bare):
        return Reply("", tuple(_bare(bare)))
    return Reply(visible.strip(), ())


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """A description of the tools, in the form of Hermes, for students whose chat template cannot write one."""
    listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return (
        f"You may call tools. Their schemas:\n<tools>\n{listed}\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _block(body: str, *, closed: bool) -> Call | BadCall:
    """The call in a <tool_call> block."""
    if not closed:
        return BadCall("the tool call does not end: </tool_call> is missing")
    function = _FUNCTION.fullmatch(body)
    if function is not None:
        # Split at closing tags first: a single expression for both tags takes quadratic time if many are left open.
        found = (_PARAMETER.search(part) for part in function[2].split("</parameter>")[:-1])
        return Call(function[1], {one[1]: one[2].removesuffix("\n") for one in found if one is not None}, coerced=True)
    if "<function=" in body:
        return BadCall("the tool call does not end: </function> is missing")
    try:
        return _call(json.loads(body, strict=False))
    except (ValueError, RecursionError) as error:
        return BadCall(f"the tool call is not valid JSON: {error}")


def _bare(text: str) -> list[Call | BadCall]:
    """Calls in Llama's form: JSON objects, separated by semicolons."""
    decoder, rest = json.JSONDecoder(strict=False), text
    found: list[Call | BadCall] = []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*found, BadCall(f"the tool call is not valid JSON: {error}")]
        found.append(_call(value))
        # Models separate calls by semicolons, spaces or line breaks.
        rest = rest[end:].lstrip("; \n")
    return found


def _call(value: Any) -> Call | BadCall:
    if not isinstance(value, dict):
        return BadCall(f"the tool call is JSON, but {type(value).__name__} and not an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall("the tool call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's API
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments of {name} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {name} are {type(arguments).__name__} and not an object")
    return Call(name, arguments)
