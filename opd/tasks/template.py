"""What a chat template makes of a prompt's messages, and what of them it leaves out.

A template takes content as text or as a list of parts, may know no system role or tools, or may take out what earlier
turns thought, and says nothing of it. So when it meets a set of roles and keys for the first time, it gets these
messages with a mark at the end of every text, and each mark is looked for in what it writes. The form in which no mark
is lost is then used; a lost text, tool call or tool is an error, and what else is lost is a remark.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from opd.errors import DataError
from opd.tasks.messages import Message
from opd.tasks.prompt import Prompt

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CACHED = 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages are given to a template: roles whose content is a list of parts, and how tool calls are written."""

    parts: frozenset[str] = frozenset()
    json_arguments: bool = False
    null_content: bool = False

    def message(self, message: Message) -> dict[str, Any]:
        """The message in this form."""
        found, calls = dict(message), message.get("tool_calls")
        if message["role"] in self.parts:
            found["content"] = [{"type": "text", "text": message["content"]}]
        elif calls and self.null_content and not message["content"]:
            found["content"] = None
        if calls and self.json_arguments:
            found["tool_calls"] = [_json_arguments(call) for call in calls]
        return found

    def leaks(self, prompt: Prompt) -> Iterator[str]:
        """What a template writes that prints the objects of this form as Python does, instead of reading them."""
        for message in map(self.message, prompt.messages or ()):
            if isinstance(message["content"], list):
                yield from map(str, message["content"])
            for call in message.get("tool_calls", ()):
                function = call.get("function")
                arguments = (function if isinstance(function, Mapping) else call).get("arguments")
                if isinstance(arguments, dict):
                    yield str(arguments)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is known of a template for one set of roles and keys: the form, what it loses, and remarks."""

    form: _Form
    lost: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


_readings: WeakKeyDictionary[Any, dict[Any, _Reading]] = WeakKeyDictionary()


def rendered(prompt: Prompt, tokenizer: Any, *, opens: bool = True) -> str:
    """The text of a chat prompt, as the tokenizer's chat template writes it with the prompt's options and tools.

    Args:
        prompt: a prompt with messages.
        tokenizer: a Hugging Face tokenizer.
        opens: ask the template to open the assistant's turn at the end.

    Raises:
        DataError: if the tokenizer has no chat template, or the template refuses the prompt or its options, or leaves
            out some of the texts, tool calls or tools.
    """
    from jinja2 import TemplateError

    reading = _reading(prompt, tokenizer)
    name = tokenizer.name_or_path
    if reading.lost:
        raise DataError(
            f"the chat template of tokenizer {name!r} leaves out {' and '.join(reading.lost)} of {prompt.name}; leave "
            "them out of the prompts, or use a tokenizer with another template."
        )
    try:
        return _written(prompt, tokenizer, reading.form, opens)
    # Templates refuse with `raise_exception`; with what they do not expect, they may fail in any of these ways.
    except TemplateError as error:
        raise DataError(
            f"the chat template of tokenizer {name!r} refuses {prompt.name}, whose roles are "
            f"{', '.join(message['role'] for message in prompt.messages or ())}: {error}; change the messages."
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        options = f" with template_options {dict(prompt.template_options)}" if prompt.template_options else ""
        raise DataError(f"the chat template of tokenizer {name!r} fails on {prompt.name}{options}: {error}.") from error


class TemplateWatch:
    """Logs, once each, what users should know of how a chat template writes prompts that it does not refuse.

    Args:
        tokenizer: its chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._said: set[str] = set()

    def __call__(self, prompt: Prompt, text: str) -> None:
        """Look at a prompt, and at what `rendered` returned for it."""
        for remark in _all_remarks(prompt, self._tokenizer, text):
            if remark not in self._said:
                self._said.add(remark)
                log.warning("the chat template of %r %s (%s)", self._tokenizer.name_or_path, remark, prompt.name)


def _all_remarks(prompt: Prompt, tokenizer: Any, text: str) -> Iterator[str]:
    yield from _reading(prompt, tokenizer).remarks
    for message in prompt.messages or ():
        content = message["content"]
        if content not in text:
            how = "removes the white space around" if content.strip() in text else "changes"
            yield f"{how} content of role {message['role']!r}"


def _written(prompt: Prompt, tokenizer: Any, form: _Form, opens: bool) -> str:
    options = dict(prompt.template_options)
    if prompt.tools:
        options["tools"] = [dict(tool) for tool in prompt.tools]
    messages = [form.message(message) for message in prompt.messages or ()]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False, **options))


def _reading(prompt: Prompt, tokenizer: Any) -> _Reading:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DataError(
            f"{prompt.name} is a list of chat messages, but tokenizer {tokenizer.name_or_path!r} has no chat "
            "template; use plain text prompts or a tokenizer with a template."
        )
    known = _readings.setdefault(tokenizer, {})
    key = (str(template), json.dumps(dict(prompt.template_options), default=str), bool(prompt.tools), _kinds(prompt))
    if key not in known:
        if len(known) >= _CACHED:
            known.clear()
        known[key] = _tried(prompt, tokenizer)
    return known[key]


def _kinds(prompt: Prompt) -> tuple[Any, ...]:
    """The messages' roles and keys, and which of them come first, last and more than once."""
    kinds = [(message["role"], bool(message["content"]), frozenset(message)) for message in prompt.messages or ()]
    return kinds[0], kinds[-1], frozenset((kind, count > 1) for kind, count in Counter(kinds).items())


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark in a prompt: what it is in, the role if that is content, and whether a template must not lose it."""

    text: str
    what: str
    role: str | None = None
    needed: bool = True


class _Attempt(NamedTuple):
    """What a template wrote of marked messages in a form, and the marks that it lost."""

    form: _Form
    text: str
    lost: list[_Mark]


def _tried(prompt: Prompt, tokenizer: Any) -> _Reading:
    """Try forms until the template loses nothing that is needed; else take the one in which it loses least."""
    marked, marks = _marked(prompt)
    attempts: list[_Attempt] = []
    for form in _forms(marked, attempts):
        text = _tried_out(marked, tokenizer, form)
        if text is not None and not any(leak in text for leak in form.leaks(marked)):
            folded = text.casefold()
            attempts.append(_Attempt(form, text, [mark for mark in marks if mark.text not in folded]))
            if not any(mark.needed for mark in attempts[-1].lost):
                break
    if not attempts:  # what fails on the marked messages in every form is left to fail on the prompt itself
        return _Reading(_Form())
    form, text, lost = min(attempts, key=lambda one: sum(mark.needed for mark in one.lost))
    said = [f"leaves out {mark.what}" for mark in lost if not mark.needed]
    said += _unread(marked, tokenizer, form, text)
    said += _turn_and_date(marked, tokenizer, form, text)
    return _Reading(form, tuple(dict.fromkeys(mark.what for mark in lost if mark.needed)), tuple(dict.fromkeys(said)))


def _forms(marked: Prompt, attempts: list[_Attempt]) -> Iterator[_Form]:
    """The forms to try: content as text, then in parts for the roles that the last attempt lost, then for all roles."""
    messages = marked.messages or ()
    every = frozenset(message["role"] for message in messages)
    calls = [message for message in messages if message.get("tool_calls")]
    nulls = (False, True) if any(not call["content"] for call in calls) else (False,)
    for null_content, json_arguments in product(nulls, (False, True) if calls else (False,)):
        form = _Form(frozenset(), json_arguments, null_content)
        yield form
        wrote = attempts and attempts[-1].form == form
        lost = frozenset(mark.role for mark in attempts[-1].lost if mark.role) if wrote else every
        yield from (replace(form, parts=parts) for parts in dict.fromkeys((lost, every)) if parts)


def _marked(prompt: Prompt) -> tuple[Prompt, list[_Mark]]:
    """The prompt with a mark at the end of every text that a template should write."""
    marks: list[_Mark] = []

    def put(text: str, what: str, role: str | None = None, needed: bool = True) -> str:
        marks.append(_Mark(f"mk{len(marks)}z", what, role, needed))
        return f"{text}{marks[-1].text}"

    messages = []
    for message in prompt.messages or ():
        role, found = message["role"], dict(message)
        if message["content"]:
            # Llama 3.1's and Mistral's own templates write a turn's calls in place of its text.
            beside = " beside its tool_calls" if message.get("tool_calls") else ""
            found["content"] = put(message["content"], f"the content of role {role!r}{beside}", role, needed=not beside)
        for key in _THOUGHTS:
            if isinstance(message.get(key), str):
                found[key] = put(message[key], f"{key} of role {role!r}", needed=False)
        if "tool_calls" in message:
            found["tool_calls"] = [_marked_call(call, put) for call in message["tool_calls"]]
        messages.append(found)
    tools = tuple(_marked_tool(tool, put) for tool in prompt.tools)
    return replace(prompt, messages=tuple(messages), tools=tools), marks


def _marked_call(call: Mapping[str, Any], put: Callable[..., str]) -> dict[str, Any]:
    def mark(function: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(function)
        if isinstance(found.get("name"), str):
            found["name"] = put(found["name"], "tool_calls")
        if isinstance(found.get("arguments"), Mapping):
            found["arguments"] = {**found["arguments"], "_": put("", "the arguments of tool_calls", needed=False)}
        return found

    return _in_function(call, mark)


def _marked_tool(tool: Mapping[str, Any], put: Callable[..., str]) -> dict[str, Any]:
    def mark(function: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(function)
        if isinstance(found.get("name"), str):
            found["name"] = put(found["name"], "tools")
        if isinstance(found.get("description"), str):
            found["description"] = put(found["description"], "the descriptions of tools", needed=False)
        return found

    return _in_function(tool, mark)


def _json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text."""

    def written(function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        text = json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": text} if isinstance(arguments, Mapping) else dict(function)

    return _in_function(call, written)


def _in_function(call: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A tool or tool call, changed where its name is: within "function", or at the top."""
    function = call.get("function")
    return {**call, "function": change(function)} if isinstance(function, Mapping) else change(call)


def _tried_out(prompt: Prompt, tokenizer: Any, form: _Form, *, opens: bool = True) -> str | None:
    """What the template writes; None if it fails, in whatever way."""
    try:
        return _written(prompt, tokenizer, form, opens)
    except Exception:  # a template is a program
        return None


def _unread(marked: Prompt, tokenizer: Any, form: _Form, text: str) -> Iterator[str]:
    """Keys of messages, such as a user's name, without which the template writes the same."""
    messages = marked.messages or ()
    known = {"role", "content", "tool_calls", *_THOUGHTS}
    for role, key in dict.fromkeys((m["role"], key) for m in messages for key in m):
        # Most templates say by order alone which call a result answers.
        if key in known or (role == "tool" and key in ("name", "tool_call_id")):
            continue
        less = [{k: v for k, v in m.items() if k != key or m["role"] != role} for m in messages]
        if _tried_out(replace(marked, messages=tuple(less)), tokenizer, form) == text:
            yield f"leaves out {key} of role {role!r}"


def _turn_and_date(marked: Prompt, tokenizer: Any, form: _Form, text: str) -> Iterator[str]:
    """Whether the template opens no turn for the assistant, or writes today's date."""
    source = str(tokenizer.chat_template)
    formats = [found[1] for found in re.findall(r"""strftime_now\(\s*(['"])(.*?)\1""", source)]
    if any(datetime.now().strftime(one) in text for one in formats):
        pin = "; set it in prompts.template_options.date_string" if "date_string" in source else ""
        yield f"writes today's date, so that a run which goes on tomorrow has other prompts{pin}"
    reply: Message = {"role": "assistant", "content": "mkz"}
    answered = replace(marked, messages=(*(marked.messages or ()), reply))
    before, wrote, _ = (_tried_out(answered, tokenizer, form, opens=False) or "").partition("mkz")
    same = _tried_out(marked, tokenizer, form, opens=False) == text
    # A template may need no opening: after [/INST] of Llama 2, the reply follows what is there.
    if same and wrote and before.rstrip() != text.rstrip() and before.startswith(text.rstrip()):
        yield "does not open the assistant's turn (add_generation_prompt), so that the student has to write its opening"
