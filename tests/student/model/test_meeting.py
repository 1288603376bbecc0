"""Ranks meet over the launcher's store, and one that is missed ends the others within the time allowed."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest
from ports import held_port
from waiting import wait_until

from opd.errors import ConfigError, RankLostError

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

WAIT = """
import threading
from contextlib import ExitStack
from student.model.meeting import join
with ExitStack() as stack:
    join(240.0, stack)
    threading.Event().wait()
"""


@pytest.fixture
def rank() -> Iterator[Callable[..., forked.Program]]:
    started: list[forked.Program] = []

    def start(index: int, port: int, *command: str) -> forked.Program:
        place = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        whole = [sys.executable, "-W", "ignore", *command]
        started.append(forked.Program(whole, env={"PATH": "/usr/bin:/bin", **place}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(120)


def test_ranks_meet_and_exchange_values(rank: Callable[..., forked.Program]) -> None:
    port = held_port()
    ranks = [rank(index, port, "-c", MEET, "240") for index in range(2)]
    wait_until(lambda: all("\n" in one.output()[0] for one in ranks), 240.0, why=lambda: ranks[0].output()[1])
    assert [one.output()[0] for one in ranks] == ["[0, 1] ['x', 'x']\n"] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_misses_another_one_says_so_and_ends(rank: Callable[..., forked.Program], index: int) -> None:
    alone = rank(index, held_port(), "-c", MEET, "0.5")
    said, errors = alone.communicate(timeout=240)
    assert alone.returncode == RankLostError.exit_code, errors
    assert f"rank {index} did not meet all 2 ranks" in said and "train.rank_patience" in said


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_other_rank_hears_of_a_mistake_in_the_recipe_of_one(
    rank: Callable[..., forked.Program], tmp_path: Path, wrong: int
) -> None:
    recipe, port = tmp_path / "recipe.yaml", held_port()
    recipe.write_text("trane: {}\n")
    waiting = rank(1 - wrong, port, "-c", WAIT)
    mistaken = rank(wrong, port, "-m", "opd.cli", "train", str(recipe))
    for one, code in ((mistaken, ConfigError.exit_code), (waiting, RankLostError.exit_code)):
        _, errors = one.communicate(timeout=240)
        assert one.returncode == code and "trane" in errors, errors
    assert f"rank {wrong} ended: " in errors
