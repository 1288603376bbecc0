"""Runs untrusted Python programs in a process that can compute and print, and nothing else.

    result = run_python(program, tests, stdin="", limits=Limits(seconds=5))

The child drops its rights before it runs the program: files can be neither written nor created, and read only below the
interpreter and the system's libraries (Landlock); no sockets, processes, signals to others, tracing, or memory that
outlives the program (seccomp); memory, processor time and output are bounded (setrlimit), and after `seconds` the
process is killed. It has no environment, no standard input but `stdin`, and no capabilities, also where root runs it.
Needs Linux 5.13 or newer on x86-64 or arm64; elsewhere it refuses, because a program would run with the rights of the
user.

It protects against programs that go wrong and policies that find shortcuts, not against bugs of the kernel: a service
that runs the programs of strangers belongs in a virtual machine of its own. Tests in source run in the process of the
program, so a program written to deceive them can; examples of input and output are compared outside of it.
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

from opd.errors import ConfigError

_CHILD = Path(__file__).with_name("code_sandbox_child.py")
_GRACE_SECONDS = 0.5
_MOST_NOTES = 100_000
_START_SECONDS = 30.0
"""An interpreter may take so long to start on a busy machine; the program's own time begins after that."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall time, and of processor time, from the moment that the program begins.
        memory_mib: address space, the interpreter's own 50 MiB or so included.
        output_bytes: of standard output and of standard error together.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    output_bytes: int = 1_000_000


class Ended(StrEnum):
    """How a program ended. `BROKEN` is a fault of the sandbox or of the tests and says nothing about the program."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    KILLED = "killed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a program.

    Attributes:
        ended: how.
        output: what it printed, standard error included.
        reason: one clause for people.
    """

    ended: Ended
    output: str = ""
    reason: str = ""


def run_python(program: str, tests: str = "", *, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a program, then tests in its namespace.

    Args:
        program: Python source, run as __main__.
        tests: Python source that raises where the program is wrong. A program that ends the process early fails;
            tests that do not compile are broken.
        stdin: what it can read.
        limits: what it may use.

    Raises:
        ConfigError: where the machine has no sandbox.
    """
    check_machine()
    limits, token = limits or Limits(), secrets.token_hex(16)
    request = json.dumps({"program": program, "tests": tests, "stdin": stdin, "token": token})
    # Files for input and output: pipes would have to be served while the program runs, or it would stall on a full one.
    # Notes come through a pipe, because it is closed when the child ends, however that happens.
    told, telling = os.pipe()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as asked, open(told, "rb", buffering=0) as notes:
        asked.write(request.encode("utf-8", "surrogatepass"))
        asked.seek(0)
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-W", "ignore", str(_CHILD), str(telling), *_numbers(limits)],
                stdin=asked,
                stdout=output,
                stderr=output,
                pass_fds=[telling],
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(telling)  # the child's copy is then the last, and the pipe ends with the child
        try:
            said, in_time = _listen(notes, limits.seconds)
        finally:
            child.kill()
            code = child.wait()
        output.seek(0)
        printed = output.read(limits.output_bytes).decode("utf-8", "replace")
        return _outcome(code if in_time else None, said, token, printed)


def _numbers(limits: Limits) -> list[str]:
    return [str(limits.seconds), str(limits.memory_mib), str(limits.output_bytes)]


def _listen(notes: FileIO, seconds: float) -> tuple[str, bool]:
    """What the child notes until it ends, and whether it ended in time.

    The child's own alarm ends the program on time; the limit here is for a program that cancels the alarm.
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
            # Cut, but read on: a program that floods the pipe must not fill this process, nor stop on a full pipe.
            said = (said + piece)[:_MOST_NOTES]
    return said.decode("utf-8", "replace"), False


def _outcome(code: int | None, told: str, token: str, printed: str) -> Ran:
    """Read what the child noted: a line when the program began, and one when its tests were through."""
    lines = told.splitlines()
    if not lines or lines[0] != "began":
        return Ran(Ended.BROKEN, printed, f"the sandbox could not be entered: {printed[-200:]}")
    if code is None or code == -signal.SIGALRM:
        return Ran(Ended.TIMED_OUT, printed, "the program took too long")
    for line in lines[1:]:
        if line.startswith(token):
            verdict = json.loads(line.removeprefix(token))
            ended = {True: Ended.PASSED, False: Ended.FAILED, None: Ended.BROKEN}[verdict["passed"]]
            return Ran(ended, printed, str(verdict["reason"]))
    if code < 0:
        return Ran(Ended.KILLED, printed, f"the program was ended by signal {-code}")
    return Ran(Ended.FAILED, printed, "the program ended itself before its tests were through")


@cache
def check_machine() -> None:
    """Refuse a machine whose kernel lacks what the sandbox needs.

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
