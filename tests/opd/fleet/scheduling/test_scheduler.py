import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.fleet.scheduling.in_flight import Call, Job
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import CallSettings


class World:
    """A scheduler with a hand-driven clock; numbers rows and remembers the calls."""

    def __init__(self, lanes: int = 1, teachers: tuple[str, ...] = ("t",), **limits: int) -> None:
        self.scheduler = Scheduler(CallSettings.model_validate(limits))
        self.now = 0.0
        self.count = 0
        for i in range(lanes):
            self.scheduler.serve(self.scheduler.add_lane(f"s{i}"), teachers)

    def row(self, tokens: int, teacher: str = "t", group: str = "", key: object = None) -> Job:
        self.count += 1
        job = Job(self.count, teacher, tokens, key, group, submitted=self.now)
        self.scheduler.submit(job)
        return job

    def plan(self) -> list[Call]:
        return self.scheduler.plan(self.now)

    def answer(self, call: Call, seconds: float) -> None:
        self.now += seconds
        for job in call.jobs:
            self.scheduler.answered(call, job, self.now)
            job.done = True
        assert self.scheduler.ended(call, self.now) == []


def tokens(call: Call) -> list[int]:
    return [job.tokens for job in call.jobs]


def test_a_new_lane_gets_two_rows_longest_first() -> None:
    world = World()
    for n in (10, 30, 20, 40):
        world.row(n)
    assert [tokens(call) for call in world.plan()] == [[40], [30]]
    assert world.plan() == []


def test_an_answer_makes_room_and_widens_the_window() -> None:
    world = World()
    for _ in range(40):
        world.row(100)
    first, second = world.plan()
    world.answer(first, 0.1)
    more = world.plan()
    lane = world.scheduler.lanes["s0"]
    assert lane.window == 200
    assert lane.in_flight_tokens == 100 + sum(sum(tokens(call)) for call in more) <= 200 + 100
    world.answer(second, 0.1)
    assert lane.window == 400


def test_the_window_never_exceeds_the_in_flight_bound() -> None:
    world = World(in_flight_tokens=500)
    for _ in range(200):
        world.row(100)
    for _ in range(30):
        for call in world.plan():
            world.answer(call, 0.01)
    for _ in range(10):
        world.plan()
    assert world.scheduler.lanes["s0"].window == 500
    assert world.scheduler.lanes["s0"].in_flight_tokens <= 600


def test_pushback_pauses_the_lane_and_halves_its_window() -> None:
    world = World()
    for _ in range(20):
        world.row(100)
    call = world.plan()[0]
    world.answer(call, 0.1)
    lane = world.scheduler.lanes["s0"]
    before = lane.window
    lane.pushed_back(world.now, world.now + 5.0)
    world.now += 4.9
    assert world.plan() == [] and lane.window == before / 2
    for running in list(lane.calls.values()):
        world.answer(running, 0.0)
    assert world.plan() == []
    world.now += 0.2
    assert world.plan() != []


def test_a_lane_refuses_while_it_has_done_nothing_else_since_its_pushback() -> None:
    world = World()
    for _ in range(20):
        world.row(100)
    lane = world.scheduler.lanes["s0"]
    old, refused = world.plan()
    world.now = 1.0
    world.scheduler.ended(refused, world.now)
    lane.pushed_back(world.now, world.now + 1.0)
    assert not lane.refuses(world.now), "it still works on a call that it took"
    world.scheduler.ended(old, world.now)
    assert lane.refuses(2.5) and not lane.refuses(4.0)
    world.now = 2.5
    (call,) = world.plan()
    assert lane.refuses(world.now), "the next call may be refused as well"
    world.answer(call, 0.1)
    assert not lane.refuses(world.now)


def test_rows_of_one_prompt_travel_together_and_payloads_never_mix() -> None:
    world = World()
    for i in range(60):
        world.row(100 + i % 7, group=f"g{i % 6}", key="topk" if i % 2 else "sampled")
    calls: list[Call] = []
    for _ in range(60):
        for call in world.plan():
            calls.append(call)
            world.answer(call, 0.01)
    assert sum(len(call.jobs) for call in calls) == 60
    assert all(len({job.batch_key for job in call.jobs}) == 1 for call in calls)
    wide = [call for call in calls if len(call.jobs) > 1]
    assert wide and sum(len({job.group for job in call.jobs}) for call in wide) < 0.75 * sum(len(c.jobs) for c in wide)


def test_calls_respect_the_servers_row_and_token_limits() -> None:
    world = World()
    world.scheduler.limit("t", 3, 250)
    for _ in range(300):
        world.row(100)
    for _ in range(200):
        for call in world.plan():
            assert len(call.jobs) <= 3 and sum(tokens(call)) <= 250
            world.answer(call, 0.01)


def test_a_row_longer_than_every_limit_still_travels_alone() -> None:
    world = World(tokens=50, in_flight_tokens=50)
    world.row(500)
    assert [tokens(call) for call in world.plan()] == [[500]]


def test_teachers_that_share_a_lane_are_served_evenly() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(30):
        world.row(100, "a")
        world.row(100, "b")
    served = {"a": 0, "b": 0}
    for _ in range(12):
        for call in world.plan():
            served[call.teacher] += sum(tokens(call))
            world.answer(call, 0.1)
    assert abs(served["a"] - served["b"]) <= 400


def test_a_teacher_that_was_idle_gets_no_credit_for_it() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(800):
        world.row(100, "a")
    for _ in range(4):
        for call in world.plan():
            world.answer(call, 0.1)
    for _ in range(800):
        world.row(100, "b")
    served = {"a": 0, "b": 0}
    for _ in range(6):
        for call in world.plan():
            served[call.teacher] += sum(tokens(call))
            world.answer(call, 0.1)
    assert min(served.values()) > 0.3 * max(served.values())


def test_a_teacher_that_worked_alone_is_not_punished_when_another_arrives_and_it_returns() -> None:
    world = World(teachers=("a", "b"))
    for _ in range(40):
        world.row(100, "a")
    while calls := world.plan():
        for call in calls:
            world.answer(call, 0.1)
    for _ in range(30):
        world.row(100, "b")
    for call in world.plan():
        world.answer(call, 0.1)
    for _ in range(30):
        world.row(100, "a")
    streak = []
    for _ in range(4):
        for call in world.plan():
            streak.append(call.teacher)
            world.answer(call, 0.1)
    assert "a" in streak


def test_a_failed_row_prefers_another_lane_and_goes_first() -> None:
    world = World(lanes=2)
    for _ in range(6):
        world.row(100)
    calls = world.plan()
    broken = next(call for call in calls if call.lane.key == "s0")
    (job,) = world.scheduler.ended(broken, world.now)
    job.failures, job.avoid = 1, {"s0"}
    world.scheduler.submit_later(job, 1.0)
    assert all(job not in call.jobs for call in world.plan())
    world.now = 1.0
    for call in calls:
        if call.lane.key == "s1":
            world.answer(call, 0.1)
            break
    again = [call for call in world.plan() if job in call.jobs]
    assert again and again[0].lane.key == "s1"


def test_a_failed_row_returns_to_the_only_lane_when_there_is_no_other() -> None:
    world = World()
    job = world.row(100)
    (call,) = world.plan()
    world.scheduler.ended(call, world.now)
    job.failures, job.avoid = 1, {"s0"}
    world.scheduler.submit_later(job, 0.5)
    world.now = 0.5
    assert [c.jobs for c in world.plan()] == [[job]]


def test_a_row_is_overtaken_only_by_rows_less_than_ten_seconds_younger() -> None:
    world = World()
    small = world.row(1)
    for _ in range(4):
        world.row(100)
    world.plan()
    world.now = 11.0
    for _ in range(10):
        world.row(100)
    for call in list(world.scheduler.lanes["s0"].calls.values()):
        world.answer(call, 0.1)
    started = [job for call in world.plan() for job in call.jobs]
    assert small in started or small.done


def test_a_lane_that_serves_no_teacher_any_more_gets_nothing() -> None:
    world = World(lanes=2)
    world.scheduler.serve(world.scheduler.lanes["s0"], ())
    for _ in range(8):
        world.row(100)
    assert {call.lane.key for call in world.plan()} == {"s1"}


def test_a_slow_lane_leaves_the_last_long_rows_to_the_fast_ones() -> None:
    world = World(lanes=2)
    for lane, speed in (("s0", 1000.0), ("s1", 10.0)):
        meter = world.scheduler.lanes[lane].meter
        meter.busy(-1.0)
        meter.answered(int(speed), 0.0)
        meter.idle()
        world.scheduler.lanes[lane].last_sent = 0.0
    world.row(1000)
    assert [call.lane.key for call in world.plan()] == ["s0"]
    world.row(900)
    assert all(call.lane.key == "s0" for call in world.plan())


def test_a_lane_that_looked_slow_gets_a_row_now_and_then() -> None:
    world = World(lanes=2)
    for lane, speed in (("s0", 1000.0), ("s1", 1.0)):
        meter = world.scheduler.lanes[lane].meter
        meter.busy(-1.0)
        meter.answered(int(speed), 0.0)
        meter.idle()
        world.scheduler.lanes[lane].last_sent = 0.0
    world.now = 5.0
    for _ in range(3):
        world.row(500)
    assert {call.lane.key for call in world.plan()} == {"s0"}
    world.now = 11.0
    assert {call.lane.key for call in world.plan()} == {"s1"}


def test_withdrawn_rows_are_not_sent() -> None:
    world = World()
    jobs = [world.row(n) for n in (10, 20, 30)]
    world.scheduler.withdraw(jobs[2])
    world.scheduler.withdraw(jobs[2])
    assert [tokens(call) for call in world.plan()] == [[20], [10]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 500), st.sampled_from("ab"), st.sampled_from(["", "g", "h"])), max_size=40),
    lanes=st.integers(1, 4),
    luck=st.lists(st.integers(0, 3), min_size=10, max_size=80),
)
def test_every_row_is_answered_exactly_once_whatever_fails(
    rows: list[tuple[int, str, str]], lanes: int, luck: list[int]
) -> None:
    world = World(lanes=lanes, teachers=("a", "b"))
    jobs = [world.row(n, teacher, group) for n, teacher, group in rows]
    answered: list[int] = []
    for step in range(2000):
        world.now += 0.3
        world.plan()
        running = [call for lane in world.scheduler.lanes.values() for call in lane.calls.values()]
        if not running and len(answered) == len(jobs):
            break
        for i, call in enumerate(running):
            roll = luck[(step + i) % len(luck)]
            if roll == 0 and step < 500:
                for job in world.scheduler.ended(call, world.now):
                    job.failures += 1
                    job.avoid.add(call.lane.key)
                    world.scheduler.submit_later(job, world.now + 0.1)
            elif roll == 1 and len(call.jobs) > 1 and call.jobs[0].number in call.waiting:
                world.scheduler.answered(call, call.jobs[0], world.now)
                call.jobs[0].done = True
                answered.append(call.jobs[0].number)
            else:
                for job in call.jobs:
                    if job.number in call.waiting:
                        world.scheduler.answered(call, job, world.now)
                        job.done = True
                        answered.append(job.number)
                assert world.scheduler.ended(call, world.now) == []
    assert sorted(answered) == sorted(job.number for job in jobs)
    for lane in world.scheduler.lanes.values():
        assert lane.in_flight_rows == lane.in_flight_tokens == 0 and not lane.calls
    assert all(queue.tokens == 0 and len(queue) == 0 for queue in world.scheduler.queues.values())


@pytest.mark.parametrize("number", range(3))
def test_a_call_that_ends_returns_only_rows_that_nobody_else_carries(number: int) -> None:
    world = World(lanes=2)
    job = world.row(100)
    (first,) = world.plan()
    other = next(lane for lane in world.scheduler.lanes.values() if lane is not first.lane)
    second = world.scheduler.start(other, [job], 1.0, world.now, hedge=True)
    assert world.scheduler.ended(first, world.now) == []
    assert world.scheduler.ended(second, world.now) == [job]
