"""What travels in one RPC of the scheduler, and what is left of it when it has ended."""

from scheduled import World, grown, tokens


def test_rows_of_a_prompt_travel_together_before_longer_rows_of_others() -> None:
    world = World(rows=3)
    for length, group in ((100, "g"), (90, "h"), (80, ""), (30, "g"), (20, "g"), (10, "g")):
        world.row(length, group=group)
    assert tokens(grown(world).plan()[0]) == [100, 30, 20]


def test_no_rpc_has_more_than_this_client_asks_for_whatever_a_server_allows() -> None:
    world = World(rows=2, tokens=100)
    world.scheduler.limit("t", 1000, 1000)
    for length in (80, 40, 30, 20):
        world.row(length)
    assert tokens(grown(world).plan()[0]) == [80, 20]


def test_a_request_stays_within_the_bytes_that_a_server_takes() -> None:
    world = World()
    first, second, third = world.row(1000), world.row(1000), world.row(1000)
    world.scheduler.limit("t", 0, 0, size=first.size + second.size + third.size)  # and a header
    assert len(grown(world).plan()[0].tasks) == 2


def test_a_row_that_is_barred_from_a_server_goes_before_longer_ones() -> None:
    world = World(servers=2)
    world.row(10).barred = frozenset({"s1"})
    for length in (40, 30, 20):
        world.row(length)
    assert next(tokens(rpc) for rpc in world.plan() if rpc.server.address == "s0") == [10]


def test_a_server_that_joins_is_asked_at_once() -> None:
    world = World()
    for _ in range(9):
        world.row(10)
    world.plan()
    world.scheduler.serve(world.scheduler.add_server("s1"), ("t",))
    assert {rpc.server.address for rpc in world.plan()} == {"s1"}


def test_what_is_dropped_is_released_once_and_what_is_done_does_not_come_back() -> None:
    world = World()
    dropped, done, left = (world.row(10) for _ in range(3))
    (rpc,) = grown(world).plan()
    world.scheduler.dropped(rpc, dropped, 0.0)
    done.done = True
    assert world.scheduler.ended(rpc, 0.0) == [left]
    server = world.scheduler.servers["s0"]
    assert (server.in_flight_rows, server.in_flight_tokens, server.rpcs) == (0, 0, {})
