"""Ranks meet over the launcher's store, and one that is missed ends the others within the time allowed."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from ports import held_port

from opd.errors import RankLostError

MEET = """
import sys
from opd.errors import OpdError
from student.model.meeting import meet
try:
    meeting = meet(float(sys.argv[1]))
    print(meeting.gather(meeting.index), meeting.gather("x"), flush=True)
    sys.stdin.read()  # the store is rank 0's
except OpdError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def rank() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(index: int, port: int, seconds: float) -> subprocess.Popen[str]:
        place = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-W", "ignore", "-c", MEET, str(seconds)]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", **place}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_meet_and_exchange_values(rank: Callable[..., subprocess.Popen[str]]) -> None:
    port = held_port()
    for process in [rank(index, port, 240.0) for index in range(2)]:
        assert process.stdout is not None and process.stdout.readline() == "[0, 1] ['x', 'x']\n"


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_misses_another_one_says_so_and_ends(
    rank: Callable[..., subprocess.Popen[str]], index: int
) -> None:
    alone = rank(index, held_port(), 0.5)
    said, errors = alone.communicate(timeout=240)
    assert alone.returncode == RankLostError.exit_code, errors
    assert f"rank {index} did not meet all 2 ranks" in said and "train.rank_patience" in said
