import numpy as np
import pytest

from opd.fleet.scheduling.hedging import Hedger, RatioQuantile
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask, ServerLoad
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import CallSettings, HedgeSettings
from opd.wire.types import PayloadSpec, ScoreItem

SPEED = 100.0  # tokens per second of every server


def row(number: int, tokens: int) -> ScoreTask:
    return ScoreTask(number, "t", ScoreItem(np.zeros(tokens, np.uint32), 1), PayloadSpec.sampled())


class World:
    """Servers of one speed, and RPCs that the test deals out."""

    def __init__(self, servers: int = 2, **settings: float) -> None:
        self.scheduler = Scheduler(CallSettings())
        self.servers = [self.scheduler.add_server(f"s{i}") for i in range(servers)]
        for server in self.servers:
            self.scheduler.serve(server, ("t",))
            server.throughput.busy(-10.0)
            server.throughput.answered(int(10 * SPEED), 0.0)
            server.throughput.idle()
        self.hedger = Hedger(HedgeSettings.model_validate(settings))
        self.hedger.budget.sent(100)
        self.count = 0

    def send(self, server: ServerLoad, *tokens: int, now: float = 0.0) -> Rpc:
        rows = []
        for length in tokens:
            self.count += 1
            rows.append(row(self.count, length))
        return self.scheduler.start(server, rows, SPEED, now)

    def choose(self, now: float) -> tuple[list[tuple[ScoreTask, str]], list[Rpc]]:
        started, stalled = self.hedger.choose(self.scheduler, now)
        return [(rpc.tasks[0], rpc.server.address) for rpc in started], stalled


def test_a_call_is_overdue_at_three_times_its_time_until_twenty_were_seen_and_never_below_one_and_a_half() -> None:
    ratio = RatioQuantile(0.95)
    for _ in range(19):
        ratio.add(10.0)
    assert ratio.value() == 3.0
    for _ in range(10):
        ratio.add(10.0)
    assert ratio.value() == 10.0
    for _ in range(400):
        ratio.add(1.0)
    assert ratio.value() == 1.5


def test_the_quantile_is_the_one_that_was_asked_for() -> None:
    for quantile, expected in ((0.5, 51.0), (0.95, 96.0)):
        ratio = RatioQuantile(quantile)
        for value in range(1, 105):
            ratio.add(float(min(value, 100)))
        assert abs(ratio.value() - expected) <= 4, quantile


def test_at_the_end_rows_go_to_an_idle_server_largest_gain_first_until_it_has_two() -> None:
    world = World(cap=1.0)
    first, second = world.send(world.servers[0], 100, 100, 100), world.send(world.servers[0], 100)
    started, stalled = world.choose(0.0)
    # The second RPC ends after 4 s and the first one, which the second does not delay, after 3.
    assert started == [(second.tasks[0], "s1"), (first.tasks[2], "s1")] and stalled == []


@pytest.mark.parametrize(("first", "hedged"), [(110, False), (120, True)])
def test_a_hedge_at_the_end_must_save_a_quarter_of_the_time(first: int, hedged: bool) -> None:
    world = World(cap=1.0)
    world.send(world.servers[1], 60)
    rpc = world.send(world.servers[0], first, 100)
    # 1.6 s there, against 2.1 s or 2.2 s here.
    assert world.choose(0.0)[0] == [(rpc.tasks[1], "s1")] * hedged


def test_while_rows_wait_only_overdue_calls_are_hedged() -> None:
    world = World(cap=1.0)
    rpc = world.send(world.servers[0], 100)
    world.scheduler.submit(row(99, 10))
    assert world.choose(2.9)[0] == []
    assert world.choose(3.1)[0] == [(rpc.tasks[0], "s1")]


def test_a_row_is_hedged_once_and_an_answered_one_never() -> None:
    world = World(servers=3, cap=1.0)
    rpc = world.send(world.servers[0], 100, 100)
    world.scheduler.answered(rpc, rpc.tasks[1], 0.0)
    assert world.choose(10.0)[0] == [(rpc.tasks[0], "s1")]
    assert world.choose(20.0) == ([], [])


def test_a_silent_server_is_expected_to_stay_silent_for_as_long_again() -> None:
    world = World(cap=1.0)
    rpc = world.send(world.servers[0], 100)
    assert world.choose(0.0)[0] == []
    assert world.choose(5.0)[0] == [(rpc.tasks[0], "s1")]


@pytest.mark.parametrize(("now", "moved"), [(1.5, False), (10.0, True)])
def test_beyond_the_budget_rows_move_from_a_server_that_has_stalled_and_from_no_other(now: float, moved: bool) -> None:
    world = World(cap=0.0)
    rpc = world.send(world.servers[0], 100, 100) if moved else world.send(world.servers[0], 100, 100, 100, 100)
    assert world.choose(now) == ([], [rpc] if moved else [])


def test_a_row_moves_three_times_at_most() -> None:
    world = World(cap=0.0)
    rpc = world.send(world.servers[0], 100)
    rpc.tasks[0].moves = 2
    assert world.choose(10.0)[1] == [rpc]
    rpc.tasks[0].moves = 3
    assert world.choose(10.0)[1] == []


def test_a_hedge_goes_where_the_row_has_not_failed() -> None:
    world = World(servers=3, cap=1.0)
    rpc = world.send(world.servers[0], 100)
    rpc.tasks[0].avoid.add("s1")
    assert world.choose(10.0)[0] == [(rpc.tasks[0], "s2")]


def test_nothing_is_hedged_or_moved_where_that_is_turned_off() -> None:
    world = World(enabled=False)
    world.send(world.servers[0], 100)
    assert world.choose(10.0) == ([], [])
