"""StageProcesses as real processes: stopped with the command, killed by a second signal, never started twice."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.errors import RunFolderError
from student.orbit.process import StageProcesses

SAVES = """
import os, signal, sys
def save(*_):
    os.write(1, b"saved\\n")  # print may be at work itself when the signal comes, and refuses to be called within
    sys.exit(5)
signal.signal(signal.SIGTERM, save)
print("running", flush=True)
signal.pause()
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"goes on\\n"))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
COMMAND = """
import sys
from pathlib import Path
from opd.errors import CancelledError
from student.orbit.process import StageProcesses
try:
    with StageProcesses(Path(sys.argv[1])) as stages:
        print("ended with", stages.run([sys.executable, "-c", sys.argv[2]]), flush=True)
except CancelledError:
    print("cancelled", flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def start(
    started: list[subprocess.Popen[str]], folder: Path, stage: str, before: tuple[str, ...] = ()
) -> tuple[subprocess.Popen[str], str]:
    """The command with a stage that has said its first line."""
    command = [*before, sys.executable, "-c", COMMAND, str(folder), stage]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_command_has_the_stage_save_and_end(
    command: list[subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process, said = start(command, tmp_path, SAVES)
    assert said == "running"
    process.send_signal(number)
    assert process.communicate()[0].split() == ["saved", "cancelled"]


def test_a_command_under_nohup_goes_on_when_its_terminal_ends(
    command: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    process, said = start(command, tmp_path, "print('running', flush=True); input()", before=("nohup",))
    assert said == "running"
    process.send_signal(signal.SIGHUP)
    assert process.communicate("\n")[0].strip() == "ended with 0"


def test_a_second_signal_kills_a_stage_that_does_not_end(command: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process, _ = start(command, tmp_path, STUBBORN)
    assert process.stdout is not None
    process.send_signal(signal.SIGXCPU)
    assert process.stdout.readline().strip() == "goes on"
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):  # a notice does not count as the first
        process.send_signal(number)
    assert process.communicate()[0].split() == ["cancelled"]


def test_a_stage_that_outlives_its_command_keeps_the_folder(
    command: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    process, pid = start(command, tmp_path, STUBBORN)
    process.kill()
    process.wait()
    with pytest.raises(RunFolderError, match="is still running"), StageProcesses(tmp_path):
        pass
    os.kill(int(pid), signal.SIGKILL)
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    with StageProcesses(tmp_path) as stages:
        assert stages.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3
