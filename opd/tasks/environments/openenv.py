"""Environments on an OpenEnv server, played over its WebSocket `/ws`: one connection is one session.

    {"prompt": "...", "environment": {"name": "openenv", "options": {"url": "http://127.0.0.1:8000"}}}

The frames are those of OpenEnv 0.10.0, recorded from a running server. They carry no version, so an answer that is not
understood ends the episode with an error that quotes it. Nor do they carry an id, so a frame that nothing asked for
would be taken for the next answer: it ends the session, and the next episode opens another. The official package is not
needed. An action is either the student's text, sent in the field named by `action`, or, if `action` is null, tool calls
to an environment that lists its tools. If the server refuses an action or its environment raises, the student reads the
error as text; a lost connection ends the episode.
"""

import contextlib
import json
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError, DataError, one_line, short
from opd.strict_json import read_json
from opd.tasks.environments.base import NoPlaceError, Observation
from opd.tasks.prompt import Prompt
from opd.tasks.tools import BadCall, Call, parse_reply

_RECOVERABLE = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Error codes after which a session continues."""


class OpenEnvOptions(Settings):
    """Where the server is, and what its actions look like."""

    url: str = Field(description="Address of the OpenEnv server, http(s):// or ws(s)://; /ws is appended.")
    action: str | None = Field(
        None,
        description="Field of an action that is set to the student's text; null means that actions are tool calls.",
    )
    observation: str | None = Field(
        None, description="Field of an observation that the student reads; null means the whole observation as JSON."
    )
    columns: list[str] = Field(
        default_factory=list, description="Columns of the prompt that are passed to the server's reset."
    )
    success: float = Field(1.0, description="Sum of an episode's rewards from which on it counts as solved.")
    connect_seconds: float = Field(10.0, gt=0, description="Seconds that connecting to the server may take.")
    answer_seconds: float = Field(
        300.0, gt=0, description="Seconds that an answer of the server may take; the limits of episodes may be shorter."
    )
    message_bytes: int = Field(16 * 2**20, ge=1024, description="Maximum size of a message from the server in bytes.")


class OpenEnv:
    """An environment of an OpenEnv server.

    A session on a server, opened by the first episode and reused by all later ones.
    """

    Options: ClassVar[type[Settings]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions) -> None:
        try:
            import websockets.sync.client
        except ImportError as error:
            raise ConfigError(
                "environment openenv needs websockets; install it with pip install 'opd[envs]'."
            ) from error
        self._options, self._connect = options, websockets.sync.client.connect
        address = options.url.rstrip("/").removesuffix("/ws").replace("http", "ws", 1)
        if not address.startswith(("ws://", "wss://")):
            raise ConfigError(
                f"url of environment openenv is {options.url!r}, but it must begin with http(s):// or ws(s)://."
            )
        self._address = f"{address}/ws"
        self._session: Any = None
        self._opened = contextlib.ExitStack()

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode."""
        self._total = 0.0
        columns = {name: prompt.extra[name] for name in self._options.columns}
        seen = self._observed(self._begin({"seed": seed, **columns}))
        if self._options.action is not None:
            return seen
        listed = self._ask("step", {"type": "list_tools"})["observation"].get("tools")
        if not listed:
            raise DataError("the server lists no tools; set action to the field of its actions that takes text")
        tools = tuple({"type": "function", "function": _function(tool)} for tool in listed)
        return Observation(seen.text, tools=tools, reward=seen.reward, done=seen.done, success=seen.success)

    def step(self, action: str) -> Observation:
        """Send the action, or carry out the tool calls in it; a reply without calls ends the episode."""
        if self._options.action is not None:
            return self._observed(self._ask("step", {self._options.action: action}))
        reply = parse_reply(action)
        if not reply.calls:
            return Observation("", reward=self._total, done=True, success=self._total >= self._options.success)
        results, last = [], Observation("")
        for call in reply.calls:
            result, last = self._call(call)
            results.append(result)
            if last.done:
                break
        return Observation("", reward=last.reward, done=last.done, success=last.success, results=tuple(results))

    def close(self) -> None:
        """End the session."""
        self._session = None
        self._opened.close()

    def _begin(self, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        if self._session is not None:
            # A server may have ended a session in which nothing was sent for long.
            with contextlib.suppress(ConnectionClosed):
                return self._ask("reset", data)
        opening = self._connect(
            self._address,
            proxy=None,
            open_timeout=self._options.connect_seconds,
            max_size=self._options.message_bytes,
        )
        self._session = self._opened.enter_context(opening)
        return self._ask("reset", data)

    def _call(self, call: Call | BadCall) -> tuple[str, Observation]:
        if isinstance(call, BadCall):
            return json.dumps({"error": call.reason}), Observation("")
        asked = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        data = self._ask("step", asked)
        seen = self._observed(data)
        inner = data["observation"]
        if inner.get("error"):
            return json.dumps({"error": inner["error"].get("message", inner["error"])}), seen
        return _result(inner.get("result"), seen.text), seen

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and read its answer; an error after which the session continues becomes an observation.

        Raises:
            NoPlaceError: if the server is full.
            DataError: if the answer is not understood or late, or is an error of another kind.
        """
        try:
            return _understood(kind, self._exchange(kind, data))
        except Exception:
            self.close()
            raise

    def _exchange(self, kind: str, data: dict[str, Any]) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(TimeoutError):
            unasked: str | bytes = self._session.recv(timeout=0)
            _understood(kind, unasked)  # a full server says so before it is asked
            raise DataError(f"the server sent a frame that nothing asked for: {one_line(unasked, 200)}")
        # A server that hangs up may have said why; its message can still be read.
        with contextlib.suppress(ConnectionClosed):
            self._session.send(json.dumps({"type": kind, "data": data}))
        seconds = self._options.answer_seconds
        try:
            answer: str | bytes = self._session.recv(timeout=seconds)
        except TimeoutError as error:
            raise DataError(f"the server did not answer within {seconds:g} s") from error
        return answer

    def _observed(self, data: dict[str, Any]) -> Observation:
        inner, reward, done = data["observation"], data.get("reward"), bool(data.get("done"))
        self._total += reward or 0.0
        field = self._options.observation
        if data.get("refused"):
            text = f"Error: {inner['error']['message']}"
        elif field is not None:
            if field not in inner:
                raise DataError(f"the observation has no field {field!r}, but {', '.join(inner)}")
            text = str(inner[field])
        else:
            text = json.dumps({name: value for name, value in inner.items() if name != "metadata"})
        success = self._total >= self._options.success if done else None
        return Observation(text, reward=None if reward is None else float(reward), done=done, success=success)


def _understood(kind: str, text: str | bytes) -> dict[str, Any]:
    """The data of an answer to a frame; see `OpenEnv._ask`."""
    try:
        frame = read_json(text)
        found: dict[str, Any] = frame.get("data") or {}
        observation, code, message = found.get("observation"), found.get("code"), found.get("message", "")
    except (ValueError, AttributeError):
        raise DataError(f"the server answers {kind} with {one_line(text, 200)}") from None
    if frame.get("type") == "error":
        if code in _RECOVERABLE and kind == "step":
            return {"observation": {"error": {"message": message}}, "refused": True}
        refused = NoPlaceError if code == "CAPACITY_REACHED" else DataError
        raise refused(f"the server refuses {kind}: {one_line(f'{code}, {message}', 200)}")
    if frame.get("type") != "observation" or not isinstance(observation, dict):
        raise DataError(f"the server answers {kind} with {one_line(text, 200)}")
    if not isinstance(reward := found.get("reward"), int | float | None):
        raise DataError(f"the reward {short(reward)} is not a number")
    return found


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}


def _result(result: Any, whole: str) -> str:
    """The text that a model reads for a tool's result: its data if that is text, else its text parts."""
    if not isinstance(result, dict):
        return whole if result is None else str(result)
    if isinstance(result.get("data"), str):
        return str(result["data"])
    parts = [part["text"] for part in result.get("content") or [] if "text" in part]
    return "\n".join(parts) if parts else json.dumps(result.get("data"))
