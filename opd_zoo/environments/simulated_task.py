"""Tasks of simulated worlds: a chat model invents one from the tools of a category and seven levels of difficulty.

    bound of an aspect = low + round((D - 1) / 99 (high - low)),   D in 1 .. 100
    level = the bound, or with probability `softness` uniform in low .. bound

    aspect        low .. high   meaning of the level
    tools         1 .. 10       number of tools to choose from
    calls         1 .. 3        number of calls that solve the task
    turns         1 .. 2        number of user messages before the episode is judged
    instructions  0 .. 2        how little the student is told about its duties
    persona       0 .. 2        expert, beginner, novice
    ambiguity     0 .. 2        how much the user leaves open
    strictness    0 .. 4        what the judge demands: intent, right tools, nothing invented, nothing twice, no detour

A task is {"instructions", "persona", "intent", "query", "calls"}; "calls" are those that the model expects. Source:
TRUSTEE, arXiv 2604.17739 (from its text: aspects, ranges and the soft draw; the linear growth of the bounds with D and
all wording are ours).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opd.tasks.chat import ChatClient, ChatFailed
from opd.tasks.json_answer import find_json

ASPECTS: dict[str, tuple[int, int]] = {
    "tools": (1, 10),
    "calls": (1, 3),
    "turns": (1, 2),
    "instructions": (0, 2),
    "persona": (0, 2),
    "ambiguity": (0, 2),
    "strictness": (0, 4),
}
"""Lowest and highest level of each aspect."""
EASIEST, HARDEST = 1, 100

_PERSONAS = ("an expert who uses the right terms", "a beginner", "a novice who does not know what tools exist")
_INSTRUCTIONS = ("in full: duties, limits and when to call which tool", "in one or two sentences", "in a few words")
_AMBIGUITY = ("says everything that is needed", "leaves one thing to be inferred", "is vague and roundabout")
_ASK = """Invent one task for an assistant that can call tools. Case {case}.

Tools:
{tools}

The user is {persona}. The user's first message {ambiguity}. Solving the task takes {calls} tool call(s).
The assistant's instructions describe its role {instructions}.

Answer with one JSON object and nothing else:
{"instructions": "...", "persona": "...", "intent": "what the user wants", "query": "the user's first message",
"calls": [{"name": "...", "arguments": {}}]}"""


class SimulatorFailed(Exception):
    """A simulated role gave no usable answer: the episode is aborted, not failed."""


def bound(aspect: str, difficulty: float) -> int:
    """The highest level of an aspect at a difficulty in 1 .. 100."""
    low, high = ASPECTS[aspect]
    return low + int((difficulty - EASIEST) / (HARDEST - EASIEST) * (high - low) + 0.5)


def draw_levels(difficulty: float, softness: float, uniform: Callable[[], float]) -> dict[str, int]:
    """Draw the level of each aspect of a task.

    Args:
        difficulty: D.
        softness: chance that an aspect is drawn inside its bounds instead of at the upper one.
        uniform: a draw in [0, 1); called twice for each aspect, so that levels do not depend on each other.
    """
    found = {}
    for aspect, (low, _) in ASPECTS.items():
        high, soft, where = bound(aspect, difficulty), uniform() < softness, uniform()
        found[aspect] = low + int(where * (high - low + 1)) if soft else high
    return found


def ask_json(client: ChatClient, role: str, messages: Sequence[Mapping[str, str]], **wanted: type) -> dict[str, Any]:
    """Ask a simulated role, and parse its answer.

    Args:
        client: who is asked.
        role: of the part, for messages.
        messages: the conversation.
        wanted: fields that the answer must have, and their types.

    Raises:
        SimulatorFailed: if there is no answer, or not of the wanted form.
    """
    try:
        text = client.ask(messages)
    except ChatFailed as error:
        raise SimulatorFailed(f"the chat model that plays the simulated {role} did not answer: {error}") from error
    # Models put line breaks into strings, which should not cost an episode.
    answer = find_json(text, opening="{", strict=False)
    if answer is None:
        raise SimulatorFailed(f"the answer of the simulated {role} is not a JSON object: {text[:80]!r}")
    found = answer.value
    for name, kind in wanted.items():
        if not isinstance(found.get(name), kind):
            raise SimulatorFailed(
                f"the answer of the simulated {role} has no {kind.__name__} {name!r}: {str(found)[:80]}"
            )
    return dict(found)


def make_task(
    client: ChatClient, case: str, tools: Sequence[Mapping[str, Any]], levels: Mapping[str, int]
) -> dict[str, Any]:
    """Invent a task for `tools` at `levels`.

    Args:
        client: who invents it.
        case: tells tasks apart that are alike in everything else: answers are kept by what was asked.
        tools: JSON schemas.
        levels: of every aspect.

    Raises:
        SimulatorFailed: if the chat model does not give a usable task.
    """
    values = {
        "case": case,
        "tools": "\n".join(json.dumps(dict(tool), sort_keys=True) for tool in tools),
        "persona": _PERSONAS[levels["persona"]],
        "ambiguity": _AMBIGUITY[levels["ambiguity"]],
        "calls": str(levels["calls"]),
        "instructions": _INSTRUCTIONS[levels["instructions"]],
    }
    question = _ASK
    for name, value in values.items():
        question = question.replace(f"{{{name}}}", value)
    messages = [{"role": "system", "content": "You write tasks."}, {"role": "user", "content": question}]
    return ask_json(client, "task writer", messages, instructions=str, persona=str, intent=str, query=str, calls=list)
