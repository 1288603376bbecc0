"""The caller's side of `opd.procs.host`: starts a host, gets children from it, and asks them with a time limit.

Unlike multiprocessing and the pools that are built on it, this needs no guard in the caller's main module and works
from any thread, and a child keeps its state from one request to the next.
"""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from opd.procs.host import CLOSE_SECONDS, LIMIT
from opd.strict_json import read_json

Answer = Mapping[str, Any]
Key = TypeVar("Key")

START_SECONDS = 120.0
"""How long a host may take to import its service, and a child to open it."""


class ChildFailed(Exception):
    """A child gave no answer, which says nothing about what was asked.

    Attributes:
        kind: raised (the service raised an exception), hung (over the time limit), died (the process ended) or invalid
            (what came is not an answer). After all but the first the child is of no more use.
    """

    def __init__(self, kind: Literal["raised", "hung", "died", "invalid"], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Child:
    """The caller's end of a child or a host, which answers one request at a time.

    Args:
        connection: the connection to it.
        seconds: how long it may take to start.

    Raises:
        ChildFailed: if it does not start.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self._pending = bytearray()
        connection.settimeout(seconds)
        try:
            while (greeting := self.receive()) is None:
                pass
        except ChildFailed:
            connection.close()
            raise
        self.pid = int(greeting["pid"])

    def ask(self, request: object, seconds: float) -> Answer:
        """The answer to a request.

        Raises:
            ChildFailed: if there is none within `seconds`.
        """
        answer = ask({0: (self, request)}, seconds)[0]
        if isinstance(answer, ChildFailed):
            raise answer
        return answer

    def quiet(self) -> bool:
        """Whether it runs, and has written nothing unasked."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return not self._pending and not poll.poll(0)

    def send(self, request: object, seconds: float) -> None:
        """Send a request.

        Raises:
            ChildFailed: if it is not read within `seconds`, the child has ended, or it has written without being asked,
                which would be taken for the answer.
        """
        try:
            if not self.quiet():
                if not self._pending and not self.connection.recv(1, socket.MSG_PEEK):
                    raise ChildFailed("died", "its process ended")
                raise ChildFailed("invalid", "it wrote without being asked")
            self.connection.settimeout(seconds)  # sending blocks if the request exceeds the buffer
            self.connection.sendall(json.dumps(request, default=str).encode() + b"\n")
        except TimeoutError as error:
            raise ChildFailed("hung", f"it read nothing within {seconds:g} s") from error
        except OSError as error:
            raise ChildFailed("died", f"its process is gone ({error.strerror})") from error

    def receive(self) -> Answer | None:
        """The answer; None as long as it is not complete.

        Raises:
            ChildFailed: if there will be none.
        """
        try:
            part = self.connection.recv(1 << 16)
        except TimeoutError as error:
            raise ChildFailed("hung", f"no answer within {self.connection.gettimeout():g} s") from error
        except OSError:
            part = b""
        if not part:
            raise ChildFailed("died", "its process ended")
        self._pending += part
        if len(self._pending) > LIMIT:
            raise ChildFailed("invalid", f"its answer is longer than {LIMIT} bytes")
        if b"\n" not in part:
            return None
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = read_json(bytes(line))
        except ValueError as error:
            raise ChildFailed("invalid", f"its answer is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ChildFailed("invalid", f"its answer is {type(answer).__name__}, not an object")
        if "error" in answer:
            raise ChildFailed("raised", str(answer["error"]))
        return answer

    def end(self) -> None:
        """Kill it and all processes that it started; a caller that waits for its answer learns that it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill it and all processes that it started, and hang up."""
        self.end()
        self.connection.close()


class Host:
    """A host process, started on first use and again if it has ended. Safe to call from several threads.

    Args:
        service: dotted path "module:Class" of a `Service`.
        argument: what it is made from.
        memory_mib: most memory of one child in MiB; 0 for no limit.
        seconds: how long the service may take to be imported, and a child to be forked.
    """

    def __init__(
        self, service: str, argument: str = "", *, memory_mib: int = 0, seconds: float = START_SECONDS
    ) -> None:
        self._arguments = [service, argument, str(memory_mib)]
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> socket.socket:
        """Start it, if it is not running, and wait until the service is imported; returns the connection to it.

        Raises:
            ChildFailed: if it cannot be imported.
        """
        if self._process is not None and self._process.poll() is None and self._connection is not None:
            return self._connection
        self._end()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "opd.procs.host", *self._arguments],
                # Where this process looks for modules, so that it finds the same ones.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *sys.path])},
                stdin=theirs.fileno(),
                # What it prints would fill a pipe that is never read, and block it.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the caller, whose requests continue while it finishes its step.
                start_new_session=True,
            )
        try:
            Child(self._connection, self._seconds)
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._end()
            raise
        return self._connection

    def connect(self) -> Child:
        """A new child.

        Raises:
            ChildFailed: if there is none.
        """
        with self._lock:
            host = self.start()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(host, [b"+"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise ChildFailed("died", f"no process can be started for it ({error})") from error
        return Child(ours, self._seconds)

    def close(self) -> None:
        """End the host; its children end with their connections, or are killed soon. The next use starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2 * CLOSE_SECONDS)
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None


def ask(requests: Mapping[Key, tuple[Child, object]], seconds: float) -> dict[Key, Answer | ChildFailed]:
    """Ask several children at the same time; each has `seconds` from when its request was sent."""
    answers: dict[Key, Answer | ChildFailed] = {}
    deadlines: dict[Key, float] = {}
    with selectors.DefaultSelector() as selector:
        # All requests are sent before any answer is awaited, so that the children work at the same time.
        for key, (child, request) in requests.items():
            try:
                child.send(request, seconds)
            except ChildFailed as error:
                answers[key] = error
                continue
            deadlines[key] = time.monotonic() + seconds
            selector.register(child.connection, selectors.EVENT_READ, key)
        while deadlines:
            for ready, _ in selector.select(max(0.0, min(deadlines.values()) - time.monotonic())):
                try:
                    answer: Answer | ChildFailed | None = requests[ready.data][0].receive()
                except ChildFailed as error:
                    answer = error
                if answer is not None:
                    answers[ready.data] = answer
            for key in [k for k, until in deadlines.items() if k not in answers and until <= time.monotonic()]:
                answers[key] = ChildFailed("hung", f"no answer within {seconds:g} s")
            for key in deadlines.keys() & answers.keys():
                selector.unregister(requests[key][0].connection)
                del deadlines[key]
    return {key: answers[key] for key in requests}
