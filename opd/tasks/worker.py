"""A child process for checks that may hang or crash, with a time limit on each.

Run as `python -m opd.tasks.worker`, it reads one JSON request per line and answers with one line of JSON. Unlike
multiprocessing, it needs no guard in the caller's main module, works from any thread, and ends by itself when the
caller is gone: its standard input closes, and an alarm ends a check in progress.
"""

import importlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from opd.strict_json import read_json

START_LIMIT = 120.0
"""Seconds that a child may take to import its libraries."""

ORPHAN_SECONDS = 2.0
"""Seconds after the caller's time limit at which a child ends a check by itself."""

MOST_BYTES = 16 * 2**20
"""Longest answer of a child."""

Answer = Mapping[str, Any]


class CheckFailed(Exception):
    """A check timed out or broke, which says nothing about the answer."""


class CheckTimedOut(CheckFailed):
    """A check took longer than its limit."""


class Worker:
    """A child process, started on first use and again after every time-out. Safe to call from several threads.

    Args:
        check: dotted path "module:function" of `function(request) -> answer`, both JSON objects; run in the child. If
            its module has a function `prepare(argument)`, the child calls that first, so that imports in it take no
            time from a check.
        timeout: seconds per request.
        argument: the argument of `prepare`.
    """

    def __init__(self, check: str, timeout: float, argument: str = "") -> None:
        self._check, self._timeout, self._argument = check, timeout, argument
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Run one check.

        Raises:
            CheckFailed: if it raises, takes too long (`CheckTimedOut`), crashes the child, or writes into its answers.
        """
        with self._lock:
            child = self._running()
            try:
                answer = self._exchange(child, json.dumps(request, default=str), self._timeout)
            except BaseException:
                # On Ctrl-C too: a child that is still busy would answer the next request with the result of this one.
                self._stop()
                raise
        if "error" in answer:
            raise CheckFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Stop the child, even in the middle of a check, which then fails; the next request starts another."""
        child = self._child
        if child is not None:
            child.kill()  # before the lock, which a caller that waits for an answer holds
        with self._lock:
            self._stop()

    def _running(self) -> "subprocess.Popen[bytes]":
        # A child that has written unasked would answer every request with what it wrote before.
        if self._child is None or self._child.poll() is not None or _readable(self._child):
            self._stop()
            self._child = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "opd.tasks.worker", *self._arguments()],
                env={**os.environ, "PYTHONPATH": python_path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What a check prints would fill a pipe that is never read, and block it.
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the caller, whose checks continue while it finishes its step.
                start_new_session=True,
                # Unbuffered, because the selector sees the pipe but not what a buffer has taken out of it.
                bufsize=0,
            )
            try:
                answer = self._exchange(self._child, "", START_LIMIT)
            except BaseException:
                self._stop()
                raise
            if "error" in answer:
                self._stop()
                raise CheckFailed(str(answer["error"]))
        return self._child

    def _arguments(self) -> list[str]:
        return [self._check, str(self._timeout), self._argument]

    def _exchange(self, child: "subprocess.Popen[bytes]", line: str, limit: float) -> Answer:
        """Send a line, unless it is empty, and wait for one."""
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        deadline = time.monotonic() + limit
        received = b""
        try:
            if line:
                child.stdin.write(line.encode() + b"\n")
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                while not received.endswith(b"\n"):
                    if not selector.select(max(0.0, deadline - time.monotonic())):
                        raise CheckTimedOut(f"no answer within {limit:g} s")
                    piece = os.read(child.stdout.fileno(), 65536)
                    if not piece:
                        raise CheckFailed("the worker process ended")
                    received += piece
                    if len(received) > MOST_BYTES:
                        raise CheckFailed(f"its answer is longer than {MOST_BYTES} bytes")
        except BrokenPipeError as error:
            raise CheckFailed("the worker process ended") from error
        try:
            answer = read_json(received)
        except ValueError as error:
            raise CheckFailed(f"its answer is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise CheckFailed(f"its answer is {type(answer).__name__}, not an object")
        return answer

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def __del__(self) -> None:
        self._stop()


def _readable(child: "subprocess.Popen[bytes]") -> bool:
    """Whether something can be read from a child at once."""
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)  # type: ignore[arg-type]  # a pipe
    return bool(poll.poll(0))


def python_path() -> str:
    """Where the child looks for modules: where this process does, so that it finds the same functions."""
    return os.pathsep.join(path for path in (os.environ.get("PYTHONPATH", ""), *sys.path) if path)


def serve(path: str, timeout: float, argument: str = "") -> None:
    """In the child: answer requests with the function at `path` until standard input closes.

    A check that takes longer than `timeout` seconds is ended by the caller. If the caller was killed, the alarm ends
    it, with its default action, which needs no interpreter: a check that hangs in C would let no thread or handler run.
    """
    # Answers use the real standard output; whatever a check prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        module, _, name = path.partition(":")
        loaded = importlib.import_module(module)
        check: Callable[[Mapping[str, Any]], Answer] = getattr(loaded, name)
        getattr(loaded, "prepare", lambda _: None)(argument)
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({})
    for line in sys.stdin:
        # Later than the caller's own limit, which ends a check with a reason; this only ends the process.
        signal.setitimer(signal.ITIMER_REAL, timeout + ORPHAN_SECONDS)
        try:
            reply(check(json.loads(line)))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), sys.argv[3])
