"""The roles in a simulated world that a chat model plays during an episode: user, tools and judge."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opd.tasks.chat import ChatClient
from opd.tasks.tools import Call
from opd_zoo.environments.simulated_task import SimulatorFailed, ask_json

_STRICT = (
    "The user's intent is met.",
    "The right tools were called with the right arguments.",
    "Nothing was invented: every fact was said by the user or a tool.",
    "No call was repeated or superfluous.",
    "There was no shorter way.",
)
"""The judge's criteria; each level of strictness adds a line to those before it."""


def user_says(client: ChatClient, task: Mapping[str, Any], told: Sequence[str]) -> tuple[str, bool]:
    """The simulated user's next message, and whether it is satisfied and says nothing more.

    Raises:
        SimulatorFailed: if there is no answer or not a usable one.
    """
    system = (
        f"You play a user: {task['persona']}. You want: {task['intent']}. You talk to an assistant. Say what the user "
        'says next. Answer with one JSON object and nothing else: {"message": "...", "done": true or false}, done once '
        "you have what you want."
    )
    found = ask_json(client, "user", _asked(system, told), message=str, done=bool)
    return str(found["message"]), bool(found["done"])


def tool_returns(
    client: ChatClient, tool: Mapping[str, Any], call: Call, task: Mapping[str, Any], told: Sequence[str]
) -> str:
    """What a simulated tool returns, as JSON text.

    Raises:
        SimulatorFailed: if there is no answer or not a usable one.
    """
    system = (
        f"You play a tool: {json.dumps(dict(tool), sort_keys=True)}. The case: {task['intent']}. Return what the tool "
        "would, true to everything that was returned before; an error where the arguments are wrong. Answer with one "
        'JSON object and nothing else: {"result": {...}}.'
    )
    asked = f"Call: {json.dumps({'name': call.name, 'arguments': dict(call.arguments)}, sort_keys=True)}"
    found = ask_json(client, "tool", _asked(system, [*told, asked]))
    if "result" not in found:
        raise SimulatorFailed(f"the answer of the simulated tool has no result: {str(found)[:80]}")
    return json.dumps(found["result"])


def judged(client: ChatClient, task: Mapping[str, Any], strictness: int, told: Sequence[str]) -> int:
    """The judge's score of an episode: 1, 0 or -1.

    Raises:
        SimulatorFailed: if there is no answer, or another one than these.
    """
    criteria = "\n".join(f"- {line}" for line in _STRICT[: strictness + 1])
    system = (
        f"You judge an assistant. The user wanted: {task['intent']}. Calls that would do: "
        f"{json.dumps(task['calls'], sort_keys=True)}. Criteria:\n{criteria}\nAnswer with one JSON object and nothing "
        'else: {"reward": 1} where all are met, {"reward": 0} where it is half done, {"reward": -1} where it failed.'
    )
    value = ask_json(client, "judge", _asked(system, told)).get("reward")
    if isinstance(value, bool) or value not in (-1, 0, 1):
        raise SimulatorFailed(f"the judge's reward is {value!r}, not -1, 0 or 1")
    return int(value)


def _asked(system: str, told: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(told)}]
