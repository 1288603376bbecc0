"""Runs classes written for TRL's `environment_factory` unchanged, by dotted path: their public methods are the tools.

    class Shop:
        def reset(self, **row): ...                 # columns of the prompt; returns None or text
        def search(self, query: str) -> str:        # a tool: type hints and a docstring with Args
            ...
        def get_reward(self) -> float: ...          # optional, asked once at the end

    {"prompt": "...", "environment": {"name": "factory", "options": {"factory": "mine:Shop"}}}

The calls in a reply are carried out in order; their results, and errors as {"error": ...}, go back in the tool role. A
reply without a call ends the episode, as in TRL; so does a true attribute `done`, which TRL does not have. Compared
with TRL at f2cd577 (2026-07-24).
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError
from opd.registry import Registry
from opd.tasks.environments.base import Observation
from opd.tasks.prompt import Prompt
from opd.tasks.tools import BadCall, Call, parse_reply

_RESERVED = ("reset", "get_reward")
_FACTORIES = Registry("environment_factory", "opd.environment_factories")


class FactoryOptions(Settings):
    """Which class."""

    factory: str = Field(
        description='Dotted path "package.module:Class" of a class, or of a function, that is called without arguments.'
    )


class Factory:
    """A class in the shape of TRL's environment_factory.

    An environment whose actions are tool calls.
    """

    Options: ClassVar[type[Settings]] = FactoryOptions

    def __init__(self, options: FactoryOptions) -> None:
        self._name = options.factory
        self._start(_FACTORIES.load(options.factory)())

    def _start(self, world: Any) -> None:
        """Use an object's public methods as tools.

        Raises:
            ConfigError: if the object has none, or if no schema can be made for one of them.
        """
        self.world = world
        self._tools: dict[str, Callable[..., Any]] = {
            name: method
            for name, method in inspect.getmembers(world, inspect.ismethod)
            if not name.startswith("_") and name not in _RESERVED
        }
        if not self._tools:
            raise ConfigError(f"environment {self._name!r} has no public method, so there is no tool to call; add one.")
        self.schemas = tuple(_schema(self._name, method) for method in self._tools.values())

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode; the class's `reset` gets those of the prompt's columns and `seed` that it accepts."""
        content: Any = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        row = {**prompt.extra, "prompt": content, "answer": prompt.answer, "seed": seed}
        accepted = inspect.signature(self.world.reset).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
            row = {name: value for name, value in row.items() if name in accepted}
        return Observation(_text(_finished(self.world.reset(**row))), tools=self.schemas)

    def step(self, action: str) -> Observation:
        """Carry out the tool calls in a reply."""
        reply = parse_reply(action)
        if not reply.calls:
            return self.answered(reply.content)
        results = tuple(self._call(call) for call in reply.calls)
        bad = sum(isinstance(call, BadCall) for call in reply.calls)
        done = bool(getattr(self.world, "done", False))
        return Observation(
            "", reward=self._reward() if done else None, done=done, results=results, info={"bad_calls": bad}
        )

    def answered(self, content: str) -> Observation:
        """The observation after a reply without a call, which ends the episode."""
        return Observation("", reward=self._reward(), done=True)

    def close(self) -> None:
        """Nothing to release; a `close` of the class would be one of its tools."""

    def _reward(self) -> float | None:
        found = getattr(self.world, "get_reward", None)
        return None if found is None else float(_finished(found()))

    def _call(self, call: Call | BadCall) -> str:
        if isinstance(call, BadCall):
            return json.dumps({"error": call.reason})
        method = self._tools.get(call.name)
        if method is None:
            return json.dumps({"error": f"there is no tool {call.name!r}; there are {', '.join(self._tools)}"})
        try:
            arguments = _typed(call, self.schemas[list(self._tools).index(call.name)])
            return _text(_finished(method(**arguments)))
        except Exception as error:  # a tool's failure is an observation
            return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    # From a leaf module, because transformers itself is slow to import.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return dict(get_json_schema(method))
    except Exception as error:
        raise ConfigError(
            f"tool {method.__name__} of environment {name!r} cannot be described: {error} Give it type hints and a "
            "docstring with Args, or a name that begins with an underscore."
        ) from error


def _typed(call: Call, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments; those that came as text from XML are converted to the schema's types."""
    if not call.coerced:
        return dict(call.arguments)
    known = schema["function"]["parameters"].get("properties", {})
    found = {}
    for name, value in call.arguments.items():
        try:
            found[name] = value if known.get(name, {}).get("type") == "string" else json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def _finished(value: Any) -> Any:
    """The result of a method, which is run to its end if it is a coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _text(value: Any) -> str:
    """The text that a model reads for a result: its string, or the text parts of a list."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "\n".join(str(part["text"]) for part in value)
    return str(value)
