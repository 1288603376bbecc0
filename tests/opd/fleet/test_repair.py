"""What becomes of the rows of an RPC that has failed, with a clock that the test drives."""

import asyncio
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from scheduled import World, grown

from opd.errors import OpdError, OutageError, OverloadedError, UnavailableError
from opd.fleet.repair import Repair
from opd.fleet.scheduling.in_flight import ScoreTask
from opd.fleet.settings import FleetSettings
from opd.fleet.status.records import FleetCounters

BUDGET = FleetSettings().outage.budget_seconds


class Desk:
    """A scheduler and the repair of its RPCs.

    Attributes:
        failed: the errors that rows ended with.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.world = World()
        self.failed: list[OpdError] = []
        self._loop = loop
        self.repair = Repair(
            FleetSettings(),
            lambda: self.world.now,
            {},
            self.world.scheduler,
            FleetCounters(),
            Mock(),
            fail=lambda task, error: self.failed.append(error),
            wake=lambda: None,
        )

    def attempt(self, task: ScoreTask, at: float, error: OpdError | None, *, taken_back: bool = False) -> None:
        """Send the row at a time, and end its RPC with an error."""
        self.world.now = at
        (rpc,) = grown(self.world).plan()
        assert rpc.tasks == [task]
        if taken_back:
            self.repair.taken_back.add(rpc.number)

        async def settle() -> None:
            self.repair.settle(rpc, error)

        self._loop.run_until_complete(settle())


@pytest.fixture
def desk() -> Iterator[Desk]:
    loop = asyncio.new_event_loop()
    yield Desk(loop)
    loop.close()


def test_refusals_without_a_break_fail_a_row_after_the_outage_budget(desk: Desk) -> None:
    row = desk.world.row(10)
    for at in (0.0, 1.0, BUDGET):
        desk.attempt(row, at, OverloadedError("busy"))
    assert not desk.failed
    desk.attempt(row, BUDGET + 1.0, OverloadedError("busy"))
    (error,) = desk.failed
    assert isinstance(error, OutageError) and f"refused for {BUDGET + 1:.0f} s" in str(error)


@pytest.mark.parametrize("taken_back", [True, False])
def test_refusals_count_anew_after_an_attempt_that_was_accepted(desk: Desk, taken_back: bool) -> None:
    row = desk.world.row(10)
    desk.attempt(row, 5.0, OverloadedError("busy"))
    desk.attempt(row, 10.0, None if taken_back else UnavailableError("the server died"), taken_back=taken_back)
    desk.attempt(row, BUDGET + 100.0, OverloadedError("busy"))
    assert not desk.failed
    desk.attempt(row, 2 * BUDGET + 101.0, OverloadedError("busy"))
    assert isinstance(desk.failed[0], OutageError)
