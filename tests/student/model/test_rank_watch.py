"""Ranks in processes of their own: when one ends, all others do, with its error."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

RANK = """
import json, os, signal, sys, threading
from contextlib import ExitStack
from opd.errors import DataError, OpdError
from student.model.rank_watch import RankWatch

class Told:
    # What the parent passes on stands in for a process group.
    count, index = 3, int(sys.argv[1])
    def gather(self, value):
        print(json.dumps(value), flush=True)
        return json.loads(sys.stdin.readline())

ranks = Told()
forever = threading.Event().wait  # a collective that no lost rank breaks
try:
    with ExitStack() as stack:
        watch = RankWatch(ranks, grace=0.2)
        stack.push(watch.leave)
        stack.push(watch.rename)
        # The time to end by itself begins where the rank says that it is there: a busy machine must not decide.
        there, expired, give_up = threading.Event(), threading.Event(), watch._give_up
        watch._give_up = lambda final: (there.wait(), give_up(final), expired.set())
        ranks.gather("ready")
        exec(sys.argv[2 + (ranks.index == 1)])
except OpdError as error:
    sys.stderr.write(f"error: {error}\\n")
    sys.exit(error.exit_code)
"""
HANGS = "there.set(); forever()"
LOST = 21


@pytest.fixture
def run() -> Iterator[Callable[[str, str], list[tuple[int, str]]]]:
    """Exit status and last line of three ranks, of which rank 1 runs the second code."""
    started: list[subprocess.Popen[str]] = []

    def start(others: str, one: str) -> list[tuple[int, str]]:
        # Where another test has set the address of its ranks, these would look for one another there.
        here = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
        pipes = {"env": here, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(i), others, one], text=True, **pipes)  # type: ignore[call-overload]
            for i in range(3)
        ]
        started.extend(ranks)
        for _ in range(2):
            said = [json.loads(rank.stdout.readline()) for rank in ranks]  # type: ignore[union-attr]
            for rank in ranks:
                print(json.dumps(said), file=rank.stdin, flush=True)
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
        return [(rank.returncode, (text.splitlines() or [""])[-1]) for rank, text in zip(ranks, errors, strict=True)]

    yield start
    for rank in started:
        rank.kill()
        rank.wait()


def test_a_killed_rank_ends_those_that_wait_for_it(run: Callable[[str, str], list[tuple[int, str]]]) -> None:
    first, killed, last = run(HANGS, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed[0] == -9
    assert (
        first
        == last
        == (
            LOST,
            "error: rank 1 ended: it reported no error, so it was killed or its machine was lost; the run continues "
            "from its last checkpoint.",
        )
    )


def test_the_error_of_a_rank_becomes_that_of_all(run: Callable[[str, str], list[tuple[int, str]]]) -> None:
    # A collective that fails because its partner has gone gives an error of its own, which does not say why.
    breaks = "watch._news.wait(); raise RuntimeError('connection closed by peer')"
    first, failed, last = run(breaks, "raise DataError('row 7 is empty; drop it.')")
    assert failed == (16, "error: row 7 is empty; drop it.")
    assert (
        first
        == last
        == (LOST, "error: rank 1 ended: row 7 is empty; drop it; the run continues from its last checkpoint.")
    )


def test_a_rank_that_fails_alone_and_waits_for_the_others_ends_too(
    run: Callable[[str, str], list[tuple[int, str]]],
) -> None:
    fails = "watch.ending(DataError('row 7 is empty; drop it.')); there.set(); forever()"
    first, failed, last = run(HANGS, fails)
    assert failed == (LOST, "error: row 7 is empty; drop it.")
    assert (
        first
        == last
        == (LOST, "error: rank 1 ended: row 7 is empty; drop it; the run continues from its last checkpoint.")
    )


def test_ranks_that_end_together_end_by_themselves(run: Callable[[str, str], list[tuple[int, str]]]) -> None:
    assert run("pass", "pass") == [(0, "")] * 3
    # Rank 1 is long gone when the others, still busy with their reports, might be ended for it.
    slow = "watch.ending(DataError('stopped.')); there.set(); expired.wait(); raise DataError('stopped.')"
    assert run(slow, "raise DataError('stopped.')") == [(16, "error: stopped.")] * 3
