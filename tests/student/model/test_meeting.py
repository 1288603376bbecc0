"""Ranks meet over the launcher's store, and one that is missed ends the others within the time allowed."""

import sys
from collections.abc import Callable, Iterator

import forked
import pytest
from ports import held_port
from waiting import wait_until

from opd.errors import RankLostError

MEET = """
import sys, threading
from opd.errors import OpdError
from student.model.meeting import meet
try:
    meeting = meet(float(sys.argv[1]))
    print(meeting.gather(meeting.index), meeting.gather("x"), flush=True)
    threading.Event().wait()  # the store is rank 0's
except OpdError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def rank() -> Iterator[Callable[..., forked.Program]]:
    started: list[forked.Program] = []

    def start(index: int, port: int, seconds: float) -> forked.Program:
        place = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-W", "ignore", "-c", MEET, str(seconds)]
        started.append(forked.Program(command, env={"PATH": "/usr/bin:/bin", **place}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(120)


def test_ranks_meet_and_exchange_values(rank: Callable[..., forked.Program]) -> None:
    port = held_port()
    ranks = [rank(index, port, 240.0) for index in range(2)]
    wait_until(lambda: all("\n" in one.output()[0] for one in ranks), 240.0, why=lambda: ranks[0].output()[1])
    assert [one.output()[0] for one in ranks] == ["[0, 1] ['x', 'x']\n"] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_misses_another_one_says_so_and_ends(rank: Callable[..., forked.Program], index: int) -> None:
    alone = rank(index, held_port(), 0.5)
    said, errors = alone.communicate(timeout=240)
    assert alone.returncode == RankLostError.exit_code, errors
    assert f"rank {index} did not meet all 2 ranks" in said and "train.rank_patience" in said
