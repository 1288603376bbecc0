"""The process in which environments run: it forks one child per slot, which plays episodes over a socket.

    python -m opd.tasks.environments.host SOCKET SPEC      # started by `opd.tasks.environments.pool`

The host imports the environment once and then only forks, so that a slot costs milliseconds and little memory. A child
that crashes, hangs or fills its memory does not affect the others. Host and children end when their pool closes or
dies, because standard input (host) or the socket (children) then reaches end of file.

Requests and answers are one line of JSON each. Requests are {"call": "reset", "prompt": {...}, "seed": 0} and {"call":
"step", "action": "..."}; answers are {"observation": {...}} or {"error": "...", "full": false}.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from typing import Any

from opd.config import parse_settings
from opd.tasks.environments import ENVIRONMENTS
from opd.tasks.environments.base import Environment, NoPlaceError, Observation
from opd.tasks.prompt import Prompt

LIMIT = 64 * 1024 * 1024
"""Longest line in bytes that is read from the pool."""


def make_environment(spec: dict[str, Any]) -> Environment:
    """An environment from {"name", "options"}.

    Raises:
        ConfigError: if the name is unknown or the options are wrong.
    """
    cls = ENVIRONMENTS.load(spec["name"])
    found: Environment = cls(
        parse_settings(cls.Options, spec.get("options") or {}, source=f"environment {spec['name']}")
    )
    return found


def prompt_to_dict(prompt: Prompt) -> dict[str, Any]:
    """The part of a prompt that is sent to an environment, as JSON values."""
    content: Any = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {"content": content, "answer": prompt.answer, "extra": dict(prompt.extra)}


def prompt_from_dict(data: dict[str, Any]) -> Prompt:
    """The inverse of `prompt_to_dict`."""
    return Prompt.make(data["content"], answer=data["answer"], extra=data["extra"])


def answer(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request and return its answer."""
    if request["call"] == "reset":
        seen = environment.reset(prompt_from_dict(request["prompt"]), request["seed"])
    else:
        seen = environment.step(request["action"])
    return answer_with(seen)


def answer_with(seen: object) -> dict[str, Any]:
    """The answer to send for what an environment returned.

    Raises:
        TypeError: if that is not an observation.
    """
    if not isinstance(seen, Observation):
        raise TypeError(f"it returned {type(seen).__name__} instead of an Observation")
    return {"observation": seen.to_dict()}


def explain(error: BaseException) -> str:
    """One clause that says what was raised, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _play(connection: socket.socket, spec: dict[str, Any]) -> None:
    """Serve calls in a child until the pool hangs up."""
    environment = make_environment(spec)
    lines = connection.makefile("rwb")
    try:
        while line := lines.readline(LIMIT):
            try:
                reply = json.dumps(answer(environment, json.loads(line)))
            except Exception as error:
                reply = json.dumps({"error": explain(error), "full": isinstance(error, NoPlaceError)})
            lines.write(reply.encode() + b"\n")
            lines.flush()
    finally:
        environment.close()


def _be_silent() -> None:
    """Discard what this process prints, which is never read and would fill a pipe or a disk."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def main(path: str, text: str) -> None:
    """Fork a child for every connection to the socket at `path`, until standard input ends."""
    spec = json.loads(text)
    # The pool keeps the real standard output; what an environment prints when it is imported goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    make_environment(spec).close()  # imports everything before the first fork, and reports mistakes early
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen(1024)
        print("ready", file=answers, flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork():
                connection.close()
                continue
            server.close()
            answers.close()
            _be_silent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # environments that run programs need exit codes
            if spec.get("memory_mib"):
                limit = int(spec["memory_mib"]) * 2**20
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            connection.sendall(f"{os.getpid()}\n".encode())  # so that the pool can kill the child
            code = 1
            try:
                _play(connection, spec)
                code = 0
            except (BrokenPipeError, ConnectionError):
                code = 0
            finally:
                os._exit(code)  # not `sys.exit`, which would run the host's exit handlers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
