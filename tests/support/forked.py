"""Python programs in processes of their own that are forked from one in which torch and transformers are loaded.

Importing these takes five seconds of processor time. A test that kills processes, or trains in two ranks, wants the
processes and not the imports; tests of start-up and of imports themselves start Python anew.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from waiting import wait_until

_CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["warm_imports"])


def warm_process() -> tuple[str | bytes, bytes | None]:
    """Address of the process that programs are forked from, which is started if it is not there, and its key.

    Python asks for a key from 3.14 on.
    """
    shared = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for that process, if it starts now
    try:
        shared.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return shared._forkserver_address, getattr(shared, "_forkserver_authkey", None)


def share_warm_process(address: str | bytes, key: bytes | None) -> None:
    """Fork from the warm process of another one, and start none: each costs five seconds of processor time."""
    shared = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    shared._forkserver_address, shared._forkserver_authkey = address, key
    shared.ensure_running = lambda: None
    if shared._forkserver_alive_fd is None:  # what would keep that process alive is sent along with every program
        shared._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)


class Program:
    """`python ...` as a process: what `subprocess.Popen` does for these forms of a command, five seconds sooner.

    Args:
        command: `[sys.executable, "-m", MODULE | "-c", CODE | SCRIPT, *arguments]`, with `-W ignore` or without.
        env: the environment; this process' when None. What a library reads when it is imported comes too late.
        cwd: where it runs; here when None.
        log: file that gets both streams; when None they are kept for `communicate`.
        start_new_session: whether it leads a session and process group of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
        start_new_session: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="opd-forked-")
        self._streams = [log or Path(self._folder.name) / name for name in ("out", "err")]
        for path in self._streams:
            path.touch()
        environment = dict(os.environ if env is None else env)
        settings = (environment, str(cwd or Path.cwd()), [str(path) for path in self._streams], start_new_session)
        self._process = _CONTEXT.Process(target=_run, args=(list(map(str, command[1:])), *settings, warm_process()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen.wait`; `timeout` in seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait, and give what it wrote to its two streams."""
        self.wait(timeout)
        return self.output()

    def output(self) -> tuple[str, str]:
        """What it has written to its two streams so far."""
        out, err = (path.read_text(errors="replace") for path in self._streams)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Tell it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def run(command: Sequence[str], *, timeout: float = 600.0, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run(..., capture_output=True, text=True)` does."""
    program = Program(command, **settings)  # type: ignore[arg-type]
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(command, program.wait(120), out, err)


def ranks(code: str, *arguments: str | Path, count: int = 2, seconds: float = 600.0) -> list[list[str]]:
    """Run `code` once for each of `count` ranks of a gloo group on this machine, with its rank as the last argument.

    Returns:
        The lines that each of them printed.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    programs = [Program([*command, str(rank)], env=environment) for rank in range(count)]
    finish(programs, seconds)
    return [program.output()[0].splitlines() for program in programs]


def finish(programs: Sequence[Program], seconds: float) -> None:
    """Wait until all have ended well; kill the others, and fail with what they wrote, as soon as one has not."""
    try:
        wait_until(lambda: all(one.poll() == 0 for one in programs) or any(one.poll() for one in programs), seconds)
    finally:
        for one in programs:
            one.kill()
    codes = [one.wait(120) for one in programs]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(one.output()[1] for one in programs)


def servers() -> SimpleNamespace:
    """What `student.run.local_server` takes for `subprocess`, so that the servers which it starts are forked."""

    def start(
        command: list[str], *, stdout: IO[bytes], stderr: int, env: dict[str, str], start_new_session: bool
    ) -> Program:
        assert stderr == subprocess.STDOUT
        served = command[command.index(str(os.getpid())) + 1 :]  # behind what ties it to its parent
        return Program(served, env=env, log=Path(stdout.name), start_new_session=start_new_session)

    return SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)


def _run(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[str],
    start_new_session: bool,
    warm: tuple[str | bytes, bytes | None],
) -> None:
    """Be `python *words` in a process that was just forked."""
    # What it forks in turn comes from the same process. Python would start another: it looks for a child of its own.
    share_warm_process(*warm)
    if start_new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in zip((1, 2), streams, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(module))
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
