"""A server for the duration of a block."""

import socket
from pathlib import Path

import pytest

from opd.errors import UnavailableError
from student.lab.tiny.summary import read_summary
from student.run.local_server import served


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


def test_a_server_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(UnavailableError, match=r"server\.log"), served({"t": tmp_path / "nothing"}, tmp_path):
        pass
    assert "nothing" in log.read_text()
