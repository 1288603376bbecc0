"""A server for the duration of a block."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opd.errors import UnavailableError
from opd_lab.tiny.summary import read_summary
from student.run.local_server import served
from student.run.with_parent import with_parent


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_a_server_lives_as_long_as_the_block_even_when_it_fails(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    with pytest.raises(RuntimeError, match="inside"), served({"t": summary.models["teacher"].path}, tmp_path) as at:
        assert _listens(at)
        raise RuntimeError("inside")
    assert not _listens(at)


@pytest.mark.usefixtures("forked_servers")
def test_a_server_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(UnavailableError, match=r"server\.log"), served({"t": tmp_path / "nothing"}, tmp_path):
        pass
    assert "nothing" in log.read_text()


WAITS = """
import os, signal, sys
def end(*_):
    os.write(1, b"told to end\\n")  # print may be at work itself when the signal comes, and refuses to be called within
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("waits", flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
from student.run.with_parent import with_parent
subprocess.run(with_parent([sys.executable, "-c", sys.argv[1]]))
"""


def test_a_command_is_told_to_end_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, WAITS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "waits\n"
        parent.kill()
        assert parent.stdout.read() == "told to end\n"  # its child holds the pipe until it has ended


def test_a_command_whose_parent_is_gone_already_does_not_begin() -> None:
    _, *rest = with_parent([sys.executable, "-c", "print('begun')"])
    rest[rest.index(str(os.getpid()))] = str(2**22 + 1)  # above every process id
    assert subprocess.run([sys.executable, *rest], capture_output=True, check=True).stdout == b""
