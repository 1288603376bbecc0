"""From an environment's observation to the ids that follow a student's turn, without encoding earlier turns again.

Encoding a whole conversation again may give other ids for text that the student sampled, and its log-probs would then
belong to tokens that it never sampled.

The ids of an episode are the prompt's, then alternately what the student sampled, verbatim, and what this module adds.
For plain text, that is the observation as it is. For chats, it is the framing of the template, taken from a dummy
conversation with a marked reply: what the template writes after the mark, up to the opening of the next assistant turn.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opd.errors import DataError
from opd.tasks.messages import Message
from opd.tasks.prompt import Prompt
from opd.tasks.template import rendered
from opd.tasks.tools import describe_tools

MARK, RESULT = "reply-of-the-student", "result-of-the-tool"
log = logging.getLogger(__name__)


def with_observation(
    prompt: Prompt, text: str, tokenizer: Any = None, tools: Sequence[Mapping[str, Any]] = ()
) -> Prompt:
    """The prompt followed by the first observation, in a chat at the end of the last user message; its identity stays.

    Args:
        prompt: the episode's prompt.
        text: the observation.
        tokenizer: the student's; only used if there are tools.
        tools: JSON schemas of tools. The chat template writes them if it can; otherwise they are put before the
            observation, in the form of Hermes.
    """
    described = prompt.tools
    if tools and prompt.messages is not None and _names(tokenizer, "tools"):
        described = (*described, *(dict(tool) for tool in tools if tool not in described))
    elif tools:
        text = f"{describe_tools(tools)}\n\n{text}"
    if prompt.messages is None:
        return replace(prompt, text=f"{prompt.text}{text}")
    *earlier, last = prompt.messages
    joined = f"{last['content']}\n\n{text}" if text else last["content"]
    return replace(prompt, messages=(*earlier, {**last, "content": joined}), tools=described)


@dataclass(frozen=True, slots=True)
class Answered:
    """An environment's answer to a turn of the student.

    Attributes:
        text: the observation.
        prompt: the episode's prompt, whose template options apply here too.
        sampled: ids of the student's turn. If the length limit cut the turn off, its missing end is added.
        results: results of all tool calls in the student's turn, in order, to be put before the observation. They get
            the template's tool role, or are part of the user's message if it has none.
    """

    text: str
    prompt: Prompt
    sampled: Sequence[int]
    results: Sequence[str] = ()


def encode_turns(turns: Sequence[Answered], tokenizer: Any, stops: frozenset[int]) -> list[list[int]]:
    """The ids between the student's turns and the next ones, for many episodes in one call of the tokenizer.

    One call takes a third of the time of a call for each.

    Args:
        turns: the environments' answers.
        tokenizer: the student's.
        stops: ids that end a turn.

    Returns:
        The ids for each episode. All of them are the environment's and none is trained on.

    Raises:
        DataError: if the chat template refuses a conversation.
    """
    if not turns:
        return []
    texts = [_between(turn.text, turn.prompt, tokenizer, turn.results) for turn in turns]
    found = []
    for turn, ids in zip(turns, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        # The framing begins with the end of the assistant's turn, which the student has usually sampled itself.
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
    """Whether the chat template leaves earlier turns unchanged when a turn is added; logs a warning if it does not.

    A template that removes thinking from earlier turns shows a deployed model another history than the one that the
    student is trained on here, where sampled ids stay as they are.
    """
    if prompt.messages is None:
        return True
    reply = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\n{MARK}"}
    before = rendered(replace(prompt, messages=(*prompt.messages, reply)), tokenizer, opens=False)
    more = (*prompt.messages, reply, {"role": "user", "content": MARK})
    after = rendered(replace(prompt, messages=more), tokenizer)
    kept = after.startswith(before.rstrip())
    if not kept:
        log.warning(
            "the chat template of %r rewrites earlier turns (it takes out their thinking); episodes keep sampled turns "
            "verbatim, which differs from what that template shows a deployed model.",
            tokenizer.name_or_path,
        )
    return kept


def _names(tokenizer: Any, word: str) -> bool:
    """Whether the chat template uses a variable of this name."""
    return re.search(rf"\b{word}\b", str(getattr(tokenizer, "chat_template", None) or "")) is not None


def _has_tool_role(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether the chat template writes messages with the role tool, instead of refusing or dropping them."""
    try:
        return RESULT in _framing([{"role": "tool", "content": RESULT}], prompt, tokenizer)
    except DataError:
        return False


def _wrapped(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


def _framing(new: list[Message], prompt: Prompt, tokenizer: Any) -> str:
    dummy = ({"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *new)
    # From a dummy: with the real history, a template might change turns that the student has already sampled.
    _, found, suffix = rendered(replace(prompt, messages=dummy), tokenizer).partition(MARK)
    if not found:
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} changes what the assistant said; use another "
            "template for episodes."
        )
    return suffix
