"""Serves an environment as an OpenEnv server, for other trainers to play over the WebSocket `/ws`.

    reset  {"type": "reset", "data": {"seed": 0, "index": 5}}     problem `index` of a task, or one drawn by `seed`; an
                                                                  environment that is not a task gets data["prompt"]
    step   {"type": "step", "data": {"message": "..."}}           the action as text
    state, close

and GET /health, /metadata, /schema. Frames and error codes are those of OpenEnv 0.10.0. A connection is a session with
its own environment, in its own thread. Errors of the environment are sent as answers, and the session continues. A
session that sends nothing for `idle_seconds` ends, so that its place is free again.

There is no authentication, so a web page in a browser on this machine must not be able to play: a request with an
Origin is refused unless it is allowed, and on a loopback address also a request with the Host of another machine.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from random import Random
from typing import Any
from urllib.parse import urlsplit

from opd.errors import OpdError, PortInUseError, one_line
from opd.strict_json import read_json
from opd.tasks.environments.base import Environment, Observation
from opd.tasks.environments.service import make_environment
from opd.tasks.prompt import Prompt

log = logging.getLogger(__name__)
_PROBLEMS = 2**31


class FrameRefused(Exception):
    """A frame cannot be carried out; the session continues."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One connection's environment.

    Args:
        spec: {"name", "options"} of the environment.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._world: Environment = make_environment(dict(spec))
        self._draw: Callable[[Random], Prompt] | None = getattr(self._world, "draw", None)
        self._begun = False
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    def answer(self, text: str | bytes) -> dict[str, Any] | None:
        """The frame that answers a frame; None if the session shall end."""
        try:
            frame = read_json(text)
        except ValueError as error:
            return _error("INVALID_JSON", str(error))
        if not isinstance(frame, dict):
            return _error("SESSION_ERROR", "a frame must be a JSON object")
        if frame.get("type") == "close":
            return None
        try:
            return self._carry_out(frame)
        except FrameRefused as refused:
            return _error(refused.code, str(refused))
        except Exception as error:  # raised by the environment; the client decides what to do
            return _error("EXECUTION_ERROR", f"{type(error).__name__}: {error}")

    def _carry_out(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        kind, data = frame.get("type"), frame.get("data") or {}
        if frame.keys() - {"type", "data"} or not isinstance(data, dict):
            raise FrameRefused("VALIDATION_ERROR", "a frame must have type and data, and data must be an object")
        if kind == "state":
            return {"type": "state", "data": dict(self._state)}
        if kind == "reset":
            return self._frame(self._reset(data))
        if kind == "step":
            return self._frame(self._step(data))
        raise FrameRefused("UNKNOWN_TYPE", f"there is no message of type {kind!r}")

    def close(self) -> None:
        """Release the environment."""
        self._world.close()

    def _reset(self, data: Mapping[str, Any]) -> Observation:
        seed = data.get("seed", 0)
        if not isinstance(seed, int):
            raise FrameRefused("VALIDATION_ERROR", f"seed is {seed!r}, not a whole number")
        if self._draw is not None:
            prompt = self._draw(Random(data.get("index", seed) % _PROBLEMS))
        elif data.get("prompt"):
            rest = {name: value for name, value in data.items() if name not in ("prompt", "answer", "seed")}
            prompt = Prompt.make(data["prompt"], answer=data.get("answer"), extra=rest)
        else:
            raise FrameRefused("VALIDATION_ERROR", "this environment has no problems of its own; give reset a prompt")
        name = data.get("episode_id") or uuid.uuid4().hex
        if not isinstance(name, str):
            raise FrameRefused("VALIDATION_ERROR", "episode_id is not text")
        self._state = {"episode_id": name, "step_count": 0}
        self._begun = False  # if the environment refuses, there is no episode to act in
        seen = self._world.reset(prompt, seed)
        self._begun = True
        start = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
        return Observation(f"{start}{seen.text}", tools=seen.tools, reward=seen.reward, done=seen.done)

    def _step(self, data: Mapping[str, Any]) -> Observation:
        message = data.get("message")
        if data.keys() != {"message"} or not isinstance(message, str):
            raise FrameRefused("VALIDATION_ERROR", "an action must be {'message': text}")
        if not self._begun:
            raise FrameRefused("EXECUTION_ERROR", "the episode has not begun; reset first")
        self._state["step_count"] += 1
        return self._world.step(message)

    @staticmethod
    def _frame(seen: Observation) -> dict[str, Any]:
        inner: dict[str, Any] = {"text": seen.text, "metadata": dict(seen.info)}
        if seen.results:
            inner["results"] = list(seen.results)
        if seen.tools:
            inner["tools"] = [dict(tool) for tool in seen.tools]
        return {"type": "observation", "data": {"observation": inner, "reward": seen.reward, "done": seen.done}}


def serve_environment(
    spec: Mapping[str, Any],
    host: str,
    port: int,
    sessions: int,
    ready: Callable[[Any, int], None],
    *,
    idle_seconds: float = 600.0,
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
) -> None:
    """Serve until the server that was passed to `ready` is shut down.

    Args:
        spec: {"name", "options"}.
        host: address to listen on.
        port: 0 takes a free one.
        sessions: most connections at a time; one more is told CAPACITY_REACHED and closed.
        ready: called with the server and its port before the first connection.
        idle_seconds: a session that sends nothing for so long ends.
        origins: web origins, such as "https://play.example", whose pages may connect; programs send none.
        hosts: names, besides loopback ones and `host`, by which clients may call the server. If empty, all names are
            accepted unless `host` is a loopback address.

    Raises:
        ConfigError: if the environment cannot be made.
        PortInUseError: if the address is in use or not one of this machine's.
    """
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    Session(spec).close()  # finds mistakes before the first connection
    places = threading.Semaphore(sessions)

    def play(connection: Any) -> None:
        # Refused rather than queued, as the protocol says, because a waiting client would run into its own time limit.
        if not places.acquire(blocking=False):
            full = _error("CAPACITY_REACHED", f"all {sessions} sessions are taken")
            full["data"] |= {"active_sessions": sessions, "max_sessions": sessions}
            connection.send(json.dumps(full))
            return
        try:
            session = Session(spec)
            try:
                for text in _frames(connection, idle_seconds):
                    reply = session.answer(text)
                    if reply is None:
                        return
                    connection.send(json.dumps(reply))
                    if reply["data"].get("code") == "SESSION_ERROR":
                        return
            finally:
                session.close()
        except OpdError as error:
            connection.send(json.dumps(_error("FACTORY_ERROR", str(error))))
        finally:
            places.release()

    def play_until_hung_up(connection: Any) -> None:
        with suppress(ConnectionClosed):
            play(connection)

    pages = {"/health": {"status": "healthy"}, "/metadata": {"name": spec["name"]}, "/schema": _SCHEMA}

    def page(connection: Any, request: Any) -> Any:
        if (hosts or _loopback(host)) and not all(
            _called(name, {host, *hosts}) for name in request.headers.get_all("Host")
        ):
            return connection.respond(HTTPStatus.FORBIDDEN, "this Host is not allowed; see opd env serve --allow-host")
        path = request.path.partition("?")[0]
        if path == "/ws":
            return None
        found = pages.get(path)
        status = HTTPStatus.OK if found is not None else HTTPStatus.NOT_FOUND
        return connection.respond(status, json.dumps(found if found is not None else {"detail": "Not Found"}))

    try:
        allowed: Any = [None, *origins]
        listening = serve(play_until_hung_up, host, port, process_request=page, origins=allowed)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port}: {one_line(error)}; choose another --host or --port, or port 0."
        ) from error
    with listening as server:
        ready(server, server.socket.getsockname()[1])
        server.serve_forever()


def _frames(connection: Any, idle_seconds: float) -> Iterator[str | bytes]:
    """What a client sends, until it is silent for too long."""
    with suppress(TimeoutError):
        while True:
            yield connection.recv(timeout=idle_seconds)
    connection.close(reason=f"nothing was sent for {idle_seconds:g} s")


def _called(host: str, names: Collection[str]) -> bool:
    """Whether a Host header has one of the names or a loopback one, whatever its port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in names or _loopback(name)


def _loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


_SCHEMA = {
    "action": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]},
    "observation": {"type": "object", "properties": {"text": {"type": "string"}}},
    "state": {
        "type": "object",
        "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}},
    },
}
