"""Runs untrusted Python programs in a process that can compute and print, and nothing else.

    result = run_python(program, tests, stdin="", limits=Limits(seconds=5))

The child gives up its rights before it runs the program. Files can be neither written nor created, and read only below
the folders of the interpreter and the system's libraries (Landlock). There are no sockets, processes, signals to other
processes, tracing, or memory that outlives the program (seccomp). Memory, processor time and output are bounded
(setrlimit), and after `seconds` the process is killed. It has no environment, no input but `stdin`, and no
capabilities, even if it is run by root. The sandbox needs Linux 5.13 or newer on x86-64 or arm64 and refuses to run
elsewhere, where a program would have the rights of the user.

It protects against programs that go wrong and policies that find shortcuts, but not against kernel bugs: a service that
runs programs of strangers belongs in a virtual machine of its own. Tests in source run in the program's process, so a
program that is written to deceive them can; examples of input and output are compared outside.
"""

import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from io import FileIO
from pathlib import Path
from typing import IO

from opd.errors import ConfigError

_CHILD = Path(__file__).with_name("code_sandbox_child.py")
_GRACE_SECONDS = 0.5
_MOST_NOTES = 100_000
_START_SECONDS = 30.0
"""Seconds that an interpreter may take to start on a busy machine; the program's own time begins after that."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall time, and processor time, from the moment that the program begins.
        memory_mib: address space in MiB, including some 50 MiB for the interpreter.
        output_bytes: bytes of standard output, and of standard error.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    output_bytes: int = 1_000_000


class Ended(StrEnum):
    """How a program ended. `BROKEN` means that the sandbox or the tests failed, and says nothing about the program."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    KILLED = "killed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of running a program.

    Attributes:
        ended: how it ended.
        output: what it printed.
        reason: why it did not pass, in one clause for people.
        errors: what it wrote to standard error.
    """

    ended: Ended
    output: str = ""
    reason: str = ""
    errors: str = ""


def run_python(program: str, tests: str = "", *, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a program, then tests in its namespace.

    Args:
        program: Python source, run as __main__.
        tests: Python source that raises if the program is wrong. A program that ends its process before the tests has
            failed; tests that do not compile are broken. Without tests, a program passes if its process ends with
            status 0.
        stdin: what the program can read.
        limits: what it may use; None for the defaults.

    Raises:
        ConfigError: if the machine does not support the sandbox.
    """
    check_machine()
    limits, token = limits or Limits(), secrets.token_hex(16)
    request = json.dumps({"program": program, "tests": tests, "token": token})
    # Files for input and output, because pipes would have to be served while the program runs, or it would stall on a
    # full one. Notes come through a pipe, because it is closed when the child ends, however that happens.
    told, telling = os.pipe()
    with (
        open(told, "rb", buffering=0) as notes,
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        for file, text, errors_as in ((asked, request, "surrogatepass"), (given, stdin, "replace")):
            file.write(text.encode("utf-8", errors_as))
            file.seek(0)
        numbers = (asked.fileno(), telling, limits.seconds, limits.memory_mib, limits.output_bytes)
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-W", "ignore", str(_CHILD), *map(str, numbers)],
                stdin=given,
                stdout=output,
                stderr=errors,
                pass_fds=[asked.fileno(), telling],
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(telling)  # the child's copy is then the last one, so the pipe ends with the child
        try:
            noted, in_time = _listen(notes, limits.seconds)
        finally:
            child.kill()
            code = child.wait()
        printed, wrote = (_read(file, limits.output_bytes) for file in (output, errors))
        ended, reason = _outcome(code if in_time else None, noted, token, wrote, tested=bool(tests))
        return Ran(ended, printed, reason, wrote)


def _read(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


def _listen(notes: FileIO, seconds: float) -> tuple[str, bool]:
    """What the child notes until it ends, and whether it ended in time.

    The child's own alarm ends the program in time; the limit here is for a program that cancels the alarm.
    """
    said, deadline = b"", time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(notes, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = notes.read(65536)
            if not piece:
                return said.decode("utf-8", "replace"), True
            if not said:
                deadline = time.monotonic() + seconds + _GRACE_SECONDS
            # Truncated but read on: a program that floods the pipe must neither fill this process nor stall on a full
            # pipe.
            said = (said + piece)[:_MOST_NOTES]
    return said.decode("utf-8", "replace"), False


def _outcome(code: int | None, told: str, token: str, wrote: str, *, tested: bool) -> tuple[Ended, str]:
    """Interpret the child's notes: a line when the program began, and a line when it failed or its tests were done.

    Args:
        code: the child's exit code; None if it took too long.
        told: the notes.
        token: what the second line begins with.
        wrote: the child's standard error.
        tested: whether there were tests.
    """
    lines = told.splitlines()
    if not lines or lines[0] != "began":
        return Ended.BROKEN, f"the sandbox could not be entered: {wrote[-200:]}"
    if code is None or code == -signal.SIGALRM:
        return Ended.TIMED_OUT, "the program took too long"
    for line in lines[1:]:
        if line.startswith(token):
            verdict = json.loads(line.removeprefix(token))
            return {True: Ended.PASSED, False: Ended.FAILED, None: Ended.BROKEN}[verdict["passed"]], verdict["reason"]
    if code < 0:
        return Ended.KILLED, f"the program was ended by signal {-code}"
    if tested:
        return Ended.FAILED, "the program ended itself before all its tests had run"
    return (Ended.FAILED, f"the program ended with status {code}") if code else (Ended.PASSED, "")


@cache
def check_machine() -> None:
    """Refuse a machine that does not support the sandbox.

    Raises:
        ConfigError: naming what is missing.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ConfigError(
            f"programs are run in a sandbox of Linux on x86-64 or arm64, and this is {sys.platform} on "
            f"{platform.machine()}; verify code elsewhere."
        )
    from opd.tasks.code_sandbox_child import landlock_version

    if landlock_version() < 1:
        raise ConfigError(
            f"this kernel ({os.uname().release}) has no Landlock, which keeps programs from writing files; use Linux "
            "5.13 or newer with Landlock enabled."
        )
