"""From an environment's observation to the ids that follow a student's turn: only new ids, no turn is encoded again.

Encoding a whole conversation anew may give other ids for text that the student sampled, and its log-probs would belong
to tokens that it never drew.

The ids of an episode are the prompt's, then in turn what the student sampled, verbatim, and what follows from here. For
plain text that is the observation as it stands. For chats it is the framing of the template, taken from one dummy
conversation with a marked reply: what the template writes after the mark, up to the opening of the next assistant turn.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opd.errors import DataError
from opd.tasks.prompt import Message, Prompt
from opd.tasks.tools import describe_tools

MARK, RESULT = "reply-of-the-student", "result-of-the-tool"
log = logging.getLogger(__name__)


def with_observation(
    prompt: Prompt, text: str, tokenizer: Any = None, tools: Sequence[Mapping[str, Any]] = ()
) -> Prompt:
    """The prompt with the first observation after it, in a chat at the end of the last user message; same identity.

    Args:
        prompt: of the episode.
        text: the observation.
        tokenizer: the student's; asked only where there are tools.
        tools: JSON schemas. The chat template writes them where it knows how to; otherwise they stand before the
            observation, in the form of Hermes.
    """
    options = prompt.template_options
    if tools and prompt.messages is not None and _names(tokenizer, "tools"):
        options = {**options, "tools": [dict(tool) for tool in tools]}
    elif tools:
        text = f"{describe_tools(tools)}\n\n{text}"
    if prompt.messages is None:
        return replace(prompt, text=f"{prompt.text}{text}")
    *earlier, last = prompt.messages
    joined = f"{last['content']}\n\n{text}" if text else last["content"]
    return replace(prompt, messages=(*earlier, {**last, "content": joined}), template_options=options)


@dataclass(frozen=True, slots=True)
class Answered:
    """What an environment answered to a turn of the student.

    Attributes:
        text: the observation.
        prompt: of the episode; its template options hold here too.
        sampled: ids of the student's turn. A turn that the length limit cut gets its missing end from here.
        results: of the tool calls in the student's turn, all of them in order, before the observation. They have the
            template's tool role, or stand in the user's message where it has none.
    """

    text: str
    prompt: Prompt
    sampled: Sequence[int]
    results: Sequence[str] = ()


def encode_turns(turns: Sequence[Answered], tokenizer: Any, stops: frozenset[int]) -> list[list[int]]:
    """The ids between student's turns and their next ones, of many episodes in one call of the tokenizer.

    One call takes a third of the time of a call for each.

    Args:
        turns: what the environments answered.
        tokenizer: the student's.
        stops: ids that end a turn.

    Returns:
        Ids of each; all of them are the environment's, none is trained on.

    Raises:
        DataError: when the chat template refuses a conversation.
    """
    if not turns:
        return []
    texts = [_between(turn.text, turn.prompt, tokenizer, turn.results) for turn in turns]
    found = []
    for turn, ids in zip(turns, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        # A chat's framing begins with the end of the assistant's turn, which the student has usually sampled itself.
        framed = turn.prompt.messages is not None and bool(turn.sampled) and turn.sampled[-1] in stops
        found.append([int(i) for i in (ids[1:] if framed and ids and ids[0] in stops else ids)])
    return found


def _between(text: str, prompt: Prompt, tokenizer: Any, results: Sequence[str]) -> str:
    if prompt.messages is None:
        return "".join([*map(_wrapped, results), text])
    new: list[Message] = []
    if results and _has_tool_role(prompt, tokenizer):
        new += [{"role": "tool", "content": result} for result in results]
    elif results:
        text = "\n".join([*map(_wrapped, results), *([text] if text else [])])
    if text or not new:
        new.append({"role": "user", "content": text})
    return _framing(new, prompt, tokenizer)


def check_append_only(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether the chat template leaves earlier turns as they were when a turn is added; warns where it does not.

    A template that takes thinking out of earlier turns shows a deployed model another history than the one that the
    student is trained on here, where sampled ids stay as they are.
    """
    if prompt.messages is None:
        return True
    reply = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\n{MARK}"}
    before = _render([*prompt.messages, reply], prompt, tokenizer, add_generation_prompt=False)
    more: list[Message] = [*prompt.messages, reply, {"role": "user", "content": MARK}]
    after = _render(more, prompt, tokenizer, add_generation_prompt=True)
    kept = after.startswith(before.rstrip())
    if not kept:
        log.warning(
            "the chat template of %r rewrites earlier turns (it takes out their thinking); episodes keep sampled turns "
            "verbatim, which differs from what that template shows a deployed model.",
            tokenizer.name_or_path,
        )
    return kept


def _names(tokenizer: Any, word: str) -> bool:
    """Whether the chat template ever reads a variable of this name."""
    return re.search(rf"\b{word}\b", str(getattr(tokenizer, "chat_template", None) or "")) is not None


def _has_tool_role(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether the chat template writes messages of role tool, and neither refuses nor drops them."""
    try:
        return RESULT in _framing([{"role": "tool", "content": RESULT}], prompt, tokenizer)
    except DataError:
        return False


def _wrapped(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


def _framing(new: list[Message], prompt: Prompt, tokenizer: Any) -> str:
    dummy: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *new]
    # Of a dummy: with the real history a template might change turns that the student has sampled already.
    text = _render(dummy, prompt, tokenizer, add_generation_prompt=True)
    _, found, suffix = text.partition(MARK)
    if not found:
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} does not write what the assistant said; use "
            "another template for episodes."
        )
    return suffix


def _render(messages: Sequence[Message], prompt: Prompt, tokenizer: Any, *, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **prompt.template_options,
            )
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} refuses several turns: {error}."
        ) from error
