"""Runs untrusted Python programs in a process that can compute and print, and nothing else.

    result = run_python(program, tests, stdin="", limits=Limits(seconds=5))

The child gives up its rights before it runs the program. Files can be neither written nor created, and read only below
the folders of the interpreter and the system's libraries (Landlock). Only system calls that compute, read, wait and
print are let through (seccomp, see `opd.procs.sandbox_calls`): no sockets, processes, signals to other processes,
tracing, changes of files, or memory that outlives the program. Memory, processor time, threads and output are bounded
(setrlimit), and after `seconds` the process is killed, as it is when the process that started it ends. It has none of
the caller's environment, no input but `stdin`, and no capabilities, even if it is run by root. Names, sizes and times
of files can be seen. The sandbox needs Linux 5.13 or newer on x86-64 or arm64 and refuses to run elsewhere, where a
program would have the rights of the user.

It protects against programs that go wrong and policies that find shortcuts, but not against kernel bugs: a service that
runs programs of strangers belongs in a virtual machine of its own. Tests in source run in the program's process, so a
program that is written to deceive them can; examples of input and output are compared outside. A program that only
garbles its verdict is wrong.
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
from opd.procs.sandbox_calls import seccomp_filter

_CHILD = Path(__file__).with_name("sandbox_child.py")
_BEGAN = b"began\n"
_LATE, _FORGED = "the program took too long", "the program wrote where only its verdict is written"
# Linear algebra in one thread, because each has its share of the limits on memory and processor time, on machines with
# many cores more than there is; matplotlib is not imported without a folder that it takes for writable.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": "/tmp"}
_GRACE_SECONDS = 0.5
_MOST_NOTES = 4096
_TICK_SECONDS = 0.02
"""How often threads are counted, for kernels that cannot limit them for one program."""

MOST_THREADS = 256
"""Threads that a program may have."""
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
    try:
        return _run(program, tests, stdin, limits or Limits())
    except OSError as error:  # no space for files, or no room for another process
        return Ran(Ended.BROKEN, reason=f"the program could not be started: {error}")


def _run(program: str, tests: str, stdin: str, limits: Limits) -> Ran:
    token = secrets.token_hex(16)
    request = {"program": program, "tests": tests, "token": token, "threads": MOST_THREADS}
    request["calls"] = seccomp_filter(platform.machine())
    # Files for input and output, because pipes would have to be served while the program runs, or it would stall on a
    # full one. Notes come through a pipe, because they are read while it runs.
    told, telling = os.pipe()
    with (
        open(told, "rb", buffering=0) as notes,
        open(telling, "wb", buffering=0) as mine,
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        for file, text in ((asked, json.dumps(request)), (given, stdin)):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        numbers = (asked.fileno(), telling, limits.seconds, limits.memory_mib, limits.output_bytes)
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-W", "ignore", str(_CHILD), *map(str, numbers)],
            stdin=given,
            stdout=output,
            stderr=errors,
            pass_fds=[asked.fileno(), telling],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            mine.close()  # the child's copy is then the last one, so the pipe ends with the child
            noted, stopped = _watch(child.pid, notes, limits.seconds)
        finally:
            child.kill()
            code = child.wait()
        printed, wrote = (_read(file, limits.output_bytes) for file in (output, errors))
        if noted.startswith(_BEGAN):
            ended, reason = stopped or _outcome(code, noted, token, tested=bool(tests))
        else:
            ended, reason = Ended.BROKEN, f"the program was not begun: {wrote.strip()[-200:]}"
        return Ran(ended, printed, reason, wrote)


def _read(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


def _watch(pid: int, notes: FileIO, seconds: float) -> tuple[bytes, tuple[Ended, str] | None]:
    """What a child notes until it ends, and why it has to be ended now, if it did not end by itself.

    The child's own alarm ends the program in time; the limit here is for a program that cancels the alarm.
    """
    said, deadline, process = b"", time.monotonic() + _START_SECONDS, os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(notes, selectors.EVENT_READ)
            selector.register(process, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(min(left, _TICK_SECONDS))]
                if said and _threads(pid) > MOST_THREADS:
                    return said, (Ended.KILLED, f"the program had more than {MOST_THREADS} threads")
                if notes in ready:
                    piece = notes.read(_MOST_NOTES)
                    if not piece:  # it has ended, or has closed the pipe and goes on
                        selector.unregister(notes)
                    elif not said:
                        deadline = time.monotonic() + seconds + _GRACE_SECONDS
                    said += piece
                    if len(said) > _MOST_NOTES:
                        return said, (Ended.FAILED, _FORGED)
                elif process in ready:  # and no more notes
                    return said, None
        return said, (Ended.TIMED_OUT, _LATE)
    finally:
        os.close(process)


def _threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2  # a folder has a link for each in it, and two of its own
    except OSError:
        return 0  # where /proc hides processes (hidepid)


def _outcome(code: int, noted: bytes, token: str, *, tested: bool) -> tuple[Ended, str]:
    """Interpret how a program ended, and its notes after "began": nothing, or the token and a verdict.

    Args:
        code: the child's exit code.
        noted: the notes.
        token: what a verdict begins with.
        tested: whether there were tests.
    """
    verdict, failed = noted.removeprefix(_BEGAN), f"{token}failed".encode()
    if code < 0:
        late = code == -signal.SIGALRM
        return (Ended.TIMED_OUT, _LATE) if late else (Ended.KILLED, f"the program was ended by signal {-code}")
    if tested and verdict == f"{token}passed".encode():
        return Ended.PASSED, ""
    if verdict.startswith(failed):
        return Ended.FAILED, verdict.removeprefix(failed).decode("utf-8", "replace")
    if verdict:
        return Ended.FAILED, _FORGED
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
    from opd.procs.sandbox_child import has_seccomp, landlock_version

    if landlock_version() < 1:
        raise ConfigError(
            f"this kernel ({os.uname().release}) has no Landlock, which keeps programs from writing files; use Linux "
            "5.13 or newer with Landlock enabled."
        )
    if not has_seccomp():
        raise ConfigError(
            f"this kernel ({os.uname().release}) takes no filter of system calls (seccomp), which keeps programs from "
            "signals and sockets; enable CONFIG_SECCOMP_FILTER, or allow prctl(PR_SET_SECCOMP) in this container."
        )
