"""Signals in real processes: the first asks for a stop, a second one ends a process that cannot answer."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RANK = """
import sys
from torch import distributed as dist
from student.run.interrupts import Interrupts
with Interrupts() as interrupts:
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    print("ready", flush=True)
    if rank == 1:
        sys.stdin.read()  # stuck in something of its own: it never comes to the collective
    dist.all_gather_object([None, None], interrupts.requested)
"""
ALONE = """
import os, signal, sys, time
from student.run.interrupts import Interrupts
with Interrupts() as interrupts:
    child = os.fork()
    if not child:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)  # of its own, while its parent has had none
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and not interrupts.requested
    signal.raise_signal(signal.SIGINT)
    assert interrupts.requested
    print("requested", flush=True)
    sys.stdin.read()
print("left in order", flush=True)
"""
NOTICES = """
import signal, sys
from student.run.interrupts import Interrupts
with Interrupts() as interrupts:
    for number in (signal.SIGUSR1, signal.SIGXCPU, signal.SIGXCPU, signal.SIGUSR2, signal.SIGTERM):
        signal.raise_signal(number)
        assert interrupts.requested
    print("requested", flush=True)
    sys.stdin.read()
print("left in order", flush=True)
"""
STARTING = """
import signal, sys
from opd.errors import CancelledError
from student.run import interrupts
interrupts._SETTLE_SECONDS = 0.1
try:
    with interrupts.Interrupts(starting=True) as asked:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except CancelledError:
            if sys.argv[1] == "swallowed":  # as libraries do that try again
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # deaf, as in the code of a rendezvous
                signal.sigwait({signal.SIGUSR1})
            if sys.argv[1] == "moving":
                with asked.held():
                    sys.stdin.read()
            raise
except CancelledError as error:
    print(error)
"""
HANGUP = """
import os, signal, sys
from student.run.interrupts import Interrupts
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGHUP)
    print(interrupts.requested, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run code in a process of its own, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object, before: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*before, sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
        environment = kept | variables | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_until(stream: object, text: str) -> None:
    for line in stream:  # type: ignore[attr-defined]
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}")


def test_a_second_signal_ends_a_rank_that_waits_for_another_in_a_collective(
    python: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    waiting, stuck = (python(RANK, tmp_path / "rendezvous", rank) for rank in range(2))
    for process in (waiting, stuck):
        read_until(process.stdout, "ready")
    waiting.send_signal(signal.SIGTERM)
    read_until(waiting.stderr, "a second signal ends the run at once")
    assert waiting.poll() is None and stuck.poll() is None
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(120) == 128 + signal.SIGTERM
    read_until(waiting.stderr, "ended by a second signal")


def test_one_signal_is_a_request_and_those_of_forked_children_are_none(
    python: Callable[..., subprocess.Popen[str]],
) -> None:
    process = python(ALONE)
    read_until(process.stdout, "requested")
    output, errors = process.communicate(timeout=240)
    assert (process.returncode, output) == (0, "left in order\n"), errors
    assert errors.count("second signal") == 1


def test_a_second_ctrl_c_has_the_code_of_an_interrupted_program(python: Callable[..., subprocess.Popen[str]]) -> None:
    process = python(ALONE)
    read_until(process.stdout, "requested")
    read_until(process.stderr, "a second signal ends the run at once")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130


def test_notices_of_a_scheduler_ask_once_however_many_come(python: Callable[..., subprocess.Popen[str]]) -> None:
    process = python(NOTICES)
    read_until(process.stdout, "requested")
    output, errors = process.communicate(timeout=240)
    assert (process.returncode, output) == (0, "left in order\n"), errors


def test_the_first_signal_ends_a_run_that_has_nothing_to_save(python: Callable[..., subprocess.Popen[str]]) -> None:
    raised, swallowed, moving = (python(STARTING, how) for how in ("raised", "swallowed", "moving"))
    output, errors = raised.communicate(timeout=240)
    assert raised.returncode == 0 and "start it again" in output and "nothing to save yet" in errors
    assert swallowed.wait(240) == 130
    read_until(swallowed.stderr, "ended by a signal before")
    output, errors = moving.communicate(timeout=240)  # an update began, so there is something to save
    assert moving.returncode == 0 and "start it again" in output and "ended by" not in errors


def test_the_end_of_the_terminal_is_a_request_unless_it_was_ignored(
    python: Callable[..., subprocess.Popen[str]],
) -> None:
    asked, ignored = python(HANGUP), python(HANGUP, before=("nohup",))
    assert asked.communicate(timeout=240)[0] == "True\n"
    assert ignored.communicate(timeout=240)[0] == "False\n"


def test_a_rank_of_torchrun_says_how_long_it_has(python: Callable[..., subprocess.Popen[str]]) -> None:
    for seconds in ("30", "600"):
        variables = {} if seconds == "30" else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
        process = python(HANGUP, TORCHELASTIC_RUN_ID="none", **variables)
        assert f"torchrun kills the ranks {seconds} s after" in process.communicate(timeout=240)[1]
