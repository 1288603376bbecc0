"""A process that imports a service once, then forks a child for every connection that its caller sends.

    python -m opd.procs.host SERVICE ARGUMENT MEMORY_MIB      # started by `opd.procs.children.Host`

A fork costs milliseconds and shares what was imported. A child that crashes, hangs or fills its memory affects no other
child. Requests and answers are one line of JSON each. Host and child begin with {"pid": ...}; {"error": ...} is the
answer to a request that raised, and `null` the request that is answered as soon as the service is open.

Nothing outlives the process that started the host: all its connections then reach end of file, and children that have
not ended some seconds later are killed, with all processes that they started.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from opd.errors import OpdError
from opd.registry import imported

LIMIT = 64 * 2**20
"""Longest request or answer in bytes."""

CLOSE_SECONDS = 5.0
"""How long children may take to close once their caller is gone."""


class Service:
    """What children do. It is made once, in the host; whatever that imports, all children share.

    Args:
        argument: what to make it from.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def open(self) -> None:
        """In a child, before its first request."""

    def answer(self, request: Any) -> Mapping[str, Any]:
        """In a child: carry out a request and return its answer; both are JSON values."""
        raise TypeError(f"{type(self).__name__} does not implement answer")

    def close(self) -> None:
        """In a child that has no more requests."""


def explain(error: BaseException) -> str:
    """One clause that says what was raised, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _serve(service: Service, connection: socket.socket) -> None:
    """Answer requests in a child until its caller hangs up."""
    problem = ""
    try:
        service.open()
    except Exception as error:
        problem = explain(error)
    lines = connection.makefile("rb")
    try:
        while line := lines.readline(LIMIT):
            try:
                request = json.loads(line)
                reply = json.dumps(
                    {"error": problem} if problem else {} if request is None else service.answer(request)
                )
            except Exception as error:
                reply = json.dumps({"error": explain(error)})
            connection.sendall(reply.encode() + b"\n")
    finally:
        service.close()


def _child(service: Service, connection: socket.socket, memory_mib: int) -> None:
    """A child, from its fork to its end."""
    os.setsid()  # a group of its own, so that it is killed with what it started
    if memory_mib:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = memory_mib * 2**20 if hard == resource.RLIM_INFINITY else min(memory_mib * 2**20, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    code = 1
    try:
        connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        _serve(service, connection)
        code = 0
    except ConnectionError:
        code = 0
    finally:
        os._exit(code)  # not `sys.exit`, which would run the host's exit handlers


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


def main(name: str, argument: str, memory_mib: int) -> None:
    """Fork a child for every connection that comes through the socket at standard input, until that ends."""
    caller = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        service: Service = imported(name)(argument)
        told: dict[str, Any] = {"pid": os.getpid()}
    except BaseException as error:
        told = {"error": str(error) if isinstance(error, OpdError) else explain(error)}
    caller.sendall(json.dumps(told).encode() + b"\n")
    children: set[int] = set()
    while sent := socket.recv_fds(caller, 1, 1)[1]:
        connection = socket.socket(fileno=sent[0])
        connection.set_inheritable(False)  # else a program that a child leaves behind would keep it open
        if child := os.fork():
            connection.close()
            _reap(children)
            children.add(child)
        else:
            caller.close()
            _child(service, connection, memory_mib)
    until = time.monotonic() + CLOSE_SECONDS
    while children and time.monotonic() < until:
        time.sleep(0.005)
        _reap(children)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
