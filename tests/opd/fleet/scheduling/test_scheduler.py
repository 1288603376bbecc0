import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import World, tokens

from opd.fleet.scheduling.in_flight import Rpc


def test_a_new_server_gets_two_rows_longest_first() -> None:
    world = World()
    for n in (10, 30, 20, 40):
        world.row(n)
    assert [tokens(rpc) for rpc in world.plan()] == [[40], [30]]
    assert world.plan() == []


def rpcs_per_hundred_rows(world: World) -> float:
    """RPCs that carry the second hundred of equal rows, once speeds and windows are known."""
    for _ in range(2):
        count = 0
        for _ in range(100):
            world.row(50)
        while any(len(queue) for queue in world.scheduler.queues.values()):
            world.plan()
            running = [rpc for server in world.scheduler.servers.values() for rpc in server.rpcs.values()]
            for rpc in running:
                count += 1
                world.answer(rpc, 0.05)
    return count


def test_a_server_that_is_alone_gets_full_rpcs_and_several_get_a_finer_grain() -> None:
    assert rpcs_per_hundred_rows(World(rows=16)) <= 7
    assert rpcs_per_hundred_rows(World(servers=2, rows=16)) > 10


def test_rows_that_come_one_by_one_to_a_busy_server_that_is_alone_travel_together() -> None:
    world = World(teachers=("t", "other"), rows=16)
    rpcs_per_hundred_rows(world)  # the window is wide open
    sent = [rpc for _ in range(20) if world.row(10) for rpc in world.plan()]
    assert [len(rpc.tasks) for rpc in sent] == [1, 1, 16]
    world.answer(sent[0], 0.1)
    assert world.plan() == []  # 17 rows are still on their way, and two that wait fill no RPC
    world.row(10, "other")
    assert [rpc.teacher for rpc in world.plan()] == ["other"]  # a busy teacher holds back no other one
    world.answer(sent[2], 0.1)
    assert [len(rpc.tasks) for rpc in world.plan()] == [2]


def test_an_answer_makes_room_and_widens_the_window() -> None:
    world = World()
    for _ in range(40):
        world.row(100)
    first, second = world.plan()
    world.answer(first, 0.1)
    more = world.plan()
    server = world.scheduler.servers["s0"]
    assert server.window == 200
    assert server.in_flight_tokens == 100 + sum(sum(tokens(rpc)) for rpc in more) <= 200 + 100
    world.answer(second, 0.1)
    assert server.window == 400


def test_the_window_never_exceeds_the_in_flight_bound() -> None:
    world = World(in_flight_tokens=500)
    for _ in range(200):
        world.row(100)
    for _ in range(30):
        for rpc in world.plan():
            world.answer(rpc, 0.01)
    for _ in range(10):
        world.plan()
    assert world.scheduler.servers["s0"].window == 500
    assert world.scheduler.servers["s0"].in_flight_tokens <= 600


def test_pushback_pauses_the_server_and_halves_its_window() -> None:
    world = World()
    for _ in range(20):
        world.row(100)
    rpc = world.plan()[0]
    world.answer(rpc, 0.1)
    server = world.scheduler.servers["s0"]
    before = server.window
    server.pushed_back(world.now, world.now + 5.0, rpc.started)
    world.now += 4.9
    assert world.plan() == [] and server.window == before / 2
    for running in list(server.rpcs.values()):
        world.answer(running, 0.0)
    assert world.plan() == []
    world.now += 0.2
    assert world.plan() != []


def test_a_server_refuses_while_it_has_done_nothing_else_since_its_pushback() -> None:
    world = World()
    for _ in range(20):
        world.row(100)
    server = world.scheduler.servers["s0"]
    old, refused = world.plan()
    world.now = 1.0
    world.scheduler.ended(refused, world.now)
    server.pushed_back(world.now, world.now + 1.0, refused.started)
    assert not server.refuses(world.now), "it still works on a rpc that it took"
    world.scheduler.ended(old, world.now)
    assert server.refuses(2.5) and not server.refuses(4.0)
    world.now = 2.5
    (rpc,) = world.plan()
    assert server.refuses(world.now), "the next rpc may be refused as well"
    world.answer(rpc, 0.1)
    assert not server.refuses(world.now)


def test_rows_of_one_prompt_travel_together_and_payloads_never_mix() -> None:
    world = World()
    for i in range(60):
        world.row(100 + i % 7, group=f"g{i % 6}", payload="topk" if i % 2 else "sampled")
    rpcs: list[Rpc] = []
    for _ in range(60):
        for rpc in world.plan():
            rpcs.append(rpc)
            world.answer(rpc, 0.01)
    assert sum(len(rpc.tasks) for rpc in rpcs) == 60
    assert all(len({task.batch_key for task in rpc.tasks}) == 1 for rpc in rpcs)
    wide = [rpc for rpc in rpcs if len(rpc.tasks) > 1]
    assert wide and sum(len({task.group for task in rpc.tasks}) for rpc in wide) < 0.75 * sum(
        len(c.tasks) for c in wide
    )


def test_rpcs_respect_the_servers_row_and_token_limits() -> None:
    world = World()
    world.scheduler.limit("t", 3, 250)
    for _ in range(300):
        world.row(100)
    for _ in range(200):
        for rpc in world.plan():
            assert len(rpc.tasks) <= 3 and sum(tokens(rpc)) <= 250
            world.answer(rpc, 0.01)


def test_a_row_longer_than_every_limit_still_travels_alone() -> None:
    world = World(tokens=50, in_flight_tokens=50)
    world.scheduler.limit("t", 1, 50, 1500)
    world.row(500)
    assert [tokens(rpc) for rpc in world.plan()] == [[500]]


def test_teachers_that_share_a_server_are_served_evenly() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(30):
        world.row(100, "a")
        world.row(100, "b")
    served = {"a": 0, "b": 0}
    for _ in range(12):
        for rpc in world.plan():
            served[rpc.teacher] += sum(tokens(rpc))
            world.answer(rpc, 0.1)
    assert abs(served["a"] - served["b"]) <= 400


def test_a_teacher_that_was_idle_gets_no_credit_for_it() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(800):
        world.row(100, "a")
    for _ in range(4):
        for rpc in world.plan():
            world.answer(rpc, 0.1)
    for _ in range(800):
        world.row(100, "b")
    served = {"a": 0, "b": 0}
    for _ in range(6):
        for rpc in world.plan():
            served[rpc.teacher] += sum(tokens(rpc))
            world.answer(rpc, 0.1)
    assert min(served.values()) > 0.3 * max(served.values())


def test_a_teacher_that_worked_alone_is_not_punished_when_another_arrives_and_it_returns() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(40):
        world.row(100, "a")
    while rpcs := world.plan():
        for rpc in rpcs:
            world.answer(rpc, 0.1)
    for _ in range(30):
        world.row(100, "b")
    for rpc in world.plan():
        world.answer(rpc, 0.1)
    for _ in range(30):
        world.row(100, "a")
    streak = []
    for _ in range(4):
        for rpc in world.plan():
            streak.append(rpc.teacher)
            world.answer(rpc, 0.1)
    assert "a" in streak


def test_a_failed_row_prefers_another_server_and_goes_first() -> None:
    world = World(servers=2)
    for _ in range(6):
        world.row(100)
    rpcs = world.plan()
    broken = next(rpc for rpc in rpcs if rpc.server.address == "s0")
    (task,) = world.scheduler.ended(broken, world.now)
    task.failures, task.avoid = 1, {"s0"}
    world.scheduler.submit_later(task, 1.0)
    assert all(task not in rpc.tasks for rpc in world.plan())
    world.now = 1.0
    for rpc in rpcs:
        if rpc.server.address == "s1":
            world.answer(rpc, 0.1)
            break
    again = [rpc for rpc in world.plan() if task in rpc.tasks]
    assert again and again[0].server.address == "s1"


def test_a_failed_row_returns_to_the_only_server_when_there_is_no_other() -> None:
    world = World()
    task = world.row(100)
    (rpc,) = world.plan()
    world.scheduler.ended(rpc, world.now)
    task.failures, task.avoid = 1, {"s0"}
    world.scheduler.submit_later(task, 0.5)
    world.now = 0.5
    assert [c.tasks for c in world.plan()] == [[task]]


def test_a_row_is_overtaken_only_by_rows_less_than_ten_seconds_younger() -> None:
    world = World()
    small = world.row(1)
    for _ in range(4):
        world.row(100)
    world.plan()
    world.now = 11.0
    for _ in range(10):
        world.row(100)
    for rpc in list(world.scheduler.servers["s0"].rpcs.values()):
        world.answer(rpc, 0.1)
    started = [task for rpc in world.plan() for task in rpc.tasks]
    assert small in started or small.done


def test_a_server_that_serves_no_teacher_any_more_gets_nothing() -> None:
    world = World(servers=2)
    world.scheduler.serve(world.scheduler.servers["s0"], ())
    for _ in range(8):
        world.row(100)
    assert {rpc.server.address for rpc in world.plan()} == {"s1"}


def measured(world: World, **speeds: int) -> None:
    """Give servers speeds in tokens per second, measured until now."""
    for server, speed in speeds.items():
        throughput = world.scheduler.servers[server].throughput
        throughput.busy(-1.0)
        throughput.answered(speed, 0.0)
        throughput.idle()
        world.scheduler.servers[server].last_sent = 0.0


def test_a_slow_server_leaves_the_last_long_rows_to_the_fast_ones() -> None:
    world = World(servers=2)
    measured(world, s0=1000, s1=10)
    world.row(1000)
    assert [rpc.server.address for rpc in world.plan()] == ["s0"]
    world.row(900)
    assert all(rpc.server.address == "s0" for rpc in world.plan())


def test_a_server_that_looked_slow_gets_a_row_now_and_then() -> None:
    world = World(servers=2)
    measured(world, s0=1000, s1=1)
    world.now = 5.0
    for _ in range(3):
        world.row(500)
    assert {rpc.server.address for rpc in world.plan()} == {"s0"}
    world.now = 11.0
    assert {rpc.server.address for rpc in world.plan()} == {"s1"}


def test_withdrawn_rows_are_not_sent() -> None:
    world = World()
    tasks = [world.row(n) for n in (10, 20, 30)]
    world.scheduler.withdraw(tasks[2])
    world.scheduler.withdraw(tasks[2])
    assert [tokens(rpc) for rpc in world.plan()] == [[20], [10]]


@pytest.mark.parametrize("servers", [2, 3])
def test_a_row_and_its_check_never_meet_on_one_server(servers: int) -> None:
    world = World(servers=servers)
    rows = [world.row(50 + i, group="g") for i in range(20)]
    checks = [world.row(50 + i, group="g") for i in range(20)]
    for row, check in zip(rows, checks, strict=True):
        row.twin, check.twin, check.is_check = check, row, True
    for _ in range(400):
        if all(task.answered_by for task in (*rows, *checks)):
            break
        world.now += 0.05
        world.plan()
        running = [rpc for server in world.scheduler.servers.values() for rpc in server.rpcs.values()]
        for rpc in running[:2]:
            for task in rpc.tasks:
                task.answered_by = rpc.server.address
            world.answer(rpc, 0.01)
    assert all(row.answered_by and check.answered_by for row, check in zip(rows, checks, strict=True))
    assert all(row.answered_by != check.answered_by for row, check in zip(rows, checks, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 500), st.sampled_from("ab"), st.sampled_from(["", "g", "h"])), max_size=40),
    servers=st.integers(1, 4),
    luck=st.lists(st.integers(0, 3), min_size=10, max_size=80),
)
def test_every_row_is_answered_exactly_once_whatever_fails(
    rows: list[tuple[int, str, str]], servers: int, luck: list[int]
) -> None:
    world = World(servers=servers, teachers=("a", "b"))
    tasks = [world.row(n, teacher, group) for n, teacher, group in rows]
    answered: list[int] = []
    for step in range(2000):
        world.now += 0.3
        world.plan()
        running = [rpc for server in world.scheduler.servers.values() for rpc in server.rpcs.values()]
        if not running and len(answered) == len(tasks):
            break
        for i, rpc in enumerate(running):
            roll = luck[(step + i) % len(luck)]
            if roll == 0 and step < 500:
                for task in world.scheduler.ended(rpc, world.now):
                    task.failures += 1
                    task.avoid.add(rpc.server.address)
                    world.scheduler.submit_later(task, world.now + 0.1)
            elif roll == 1 and len(rpc.tasks) > 1 and rpc.tasks[0].number in rpc.waiting:
                world.scheduler.answered(rpc, rpc.tasks[0], world.now)
                rpc.tasks[0].done = True
                answered.append(rpc.tasks[0].number)
            else:
                for task in rpc.tasks:
                    if task.number in rpc.waiting:
                        world.scheduler.answered(rpc, task, world.now)
                        task.done = True
                        answered.append(task.number)
                assert world.scheduler.ended(rpc, world.now) == []
    assert sorted(answered) == sorted(task.number for task in tasks)
    for server in world.scheduler.servers.values():
        assert server.in_flight_rows == server.in_flight_tokens == 0 and not server.rpcs
    assert all(queue.tokens == 0 and len(queue) == 0 for queue in world.scheduler.queues.values())


@pytest.mark.parametrize("number", range(3))
def test_a_call_that_ends_returns_only_rows_that_nobody_else_carries(number: int) -> None:
    world = World(servers=2)
    task = world.row(100)
    (first,) = world.plan()
    other = next(server for server in world.scheduler.servers.values() if server is not first.server)
    second = world.scheduler.start(other, [task], 1.0, world.now, hedge=True)
    assert world.scheduler.ended(first, world.now) == []
    assert world.scheduler.ended(second, world.now) == [task]
