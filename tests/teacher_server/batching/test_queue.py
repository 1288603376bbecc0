"""The queue: fair between principals and their names, earliest deadline first, nothing lost."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.batching.admission import Client
from teacher_server.batching.queue import MAX_REMEMBERED, FairQueue, SequenceJob
from teacher_server.engines.base import EngineItem


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def job(client: str = "a", tokens: int = 10, deadline: float = 1e9, principal: str = "p") -> SequenceJob:
    item = EngineItem(ScoreItem(np.zeros(2, np.uint32), 1), PayloadSpec.sampled())
    return SequenceJob(item, tokens, deadline, Client(principal, client), lambda *a: None)


def fill(queue: FairQueue, *jobs: SequenceJob) -> list[SequenceJob]:
    for one in jobs:
        queue.add(one)
    return list(jobs)


def test_a_batch_respects_tokens_and_sequences() -> None:
    queue = FairQueue(Clock())
    fill(queue, *(job() for _ in range(10)))
    assert len(queue.take(35, 100)[0]) == 3
    assert len(queue.take(1000, 4)[0]) == 4
    assert (queue.sequences, queue.tokens) == (3, 30)


def test_a_sequence_longer_than_a_batch_goes_alone_and_is_not_overtaken() -> None:
    queue = FairQueue(Clock())
    first, long, last = fill(queue, job(), job(tokens=500), job())
    assert queue.take(100, 9)[0] == [first]
    assert queue.take(100, 9)[0] == [long]
    assert queue.take(100, 9)[0] == [last]


def test_within_a_client_the_earliest_deadline_goes_first_then_the_oldest() -> None:
    queue = FairQueue(Clock())
    late, soon, also_soon = fill(queue, job(deadline=300), job(deadline=200), job(deadline=200))
    assert queue.take(1000, 9)[0] == [soon, also_soon, late]


def test_a_client_with_few_sequences_is_not_held_up_by_one_with_many() -> None:
    queue = FairQueue(Clock())
    fill(queue, *(job("big") for _ in range(100)))
    queue.take(30, 99)
    small = fill(queue, job("small"))[0]
    batch, _ = queue.take(30, 99)
    assert small in batch


def test_clients_share_by_tokens_not_by_sequences() -> None:
    queue = FairQueue(Clock())
    fill(queue, *(job("long", tokens=100) for _ in range(50)), *(job("short", tokens=10) for _ in range(500)))
    served: Counter[str] = Counter()
    for _ in range(20):
        for one in queue.take(200, 99)[0]:
            served[one.client.name] += one.tokens
    assert abs(served["long"] - served["short"]) <= 200


def test_leaving_and_coming_back_sheds_no_debt_and_gains_no_credit() -> None:
    queue = FairQueue(Clock())
    fill(queue, *(job("steady") for _ in range(200)))
    served: Counter[str] = Counter()
    for _ in range(100):
        # "hopper" always has just one job waiting, so its queue empties each time it is served.
        if Client("p", "hopper") not in queue.clients:
            fill(queue, job("hopper"))
        for one in queue.take(10, 1)[0]:
            served[one.client.name] += 1
    assert abs(served["steady"] - served["hopper"]) <= 2


def test_expired_jobs_are_returned_apart_and_cancelled_ones_vanish() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    dead, gone, good = fill(queue, job(deadline=101), job(), job())
    gone.cancelled = True
    clock.now = 102
    batch, expired = queue.take(1000, 9)
    assert (batch, expired) == ([good], [dead])
    assert (queue.sequences, queue.tokens) == (0, 0)


def test_purge_forgets_cancelled_jobs_at_once() -> None:
    queue = FairQueue(Clock())
    jobs = fill(queue, *(job(c) for c in "aabb"))
    jobs[0].cancelled = jobs[2].cancelled = jobs[3].cancelled = True
    queue.purge()
    assert (queue.sequences, queue.tokens) == (1, 10)
    assert queue.clients == [Client("p", "a")]
    assert queue.drain() == [jobs[1]]
    assert queue.take(1000, 9) == ([], [])


@pytest.mark.parametrize("leave", [FairQueue.purge, lambda queue: queue.take(10, 1)])
def test_a_client_does_not_shed_what_it_was_served_by_cancelling_the_rest(leave: Any) -> None:
    queue = FairQueue(Clock())
    served, rest = fill(queue, job("a", 900), job("a"))
    assert queue.take(1000, 1)[0] == [served]
    rest.cancelled = True
    leave(queue)
    fill(queue, job("a"), job("b"))
    assert [one.client.name for one in queue.take(10, 1)[0]] == ["b"]


def test_a_principal_gains_nothing_by_a_new_name_for_every_sequence() -> None:
    queue = FairQueue(Clock())
    served: Counter[str] = Counter()
    fill(queue, *(job("steady", principal="polite") for _ in range(400)))
    for number in range(200):
        fill(queue, *(job(f"n{number}.{n}", principal="greedy") for n in range(10)))
        for one in queue.take(40, 99)[0]:
            served[one.client.principal] += one.tokens
    assert abs(served["polite"] - served["greedy"]) <= 40


def test_names_share_the_turns_of_their_principal() -> None:
    queue = FairQueue(Clock())
    fill(queue, *(job(name, principal="one") for name in "ab" for _ in range(100)))
    fill(queue, *(job(principal="two") for _ in range(100)))
    served = Counter(one.client for _ in range(20) for one in queue.take(80, 99)[0])
    assert abs(served[Client("one", "a")] - served[Client("one", "b")]) <= 1
    assert abs(2 * served[Client("one", "a")] - served[Client("two", "a")]) <= 2


@pytest.mark.parametrize("field", ["client", "principal"])
def test_names_that_never_come_back_are_forgotten(field: str) -> None:
    queue = FairQueue(Clock())
    for number in range(3 * MAX_REMEMBERED):
        fill(queue, job(**{field: f"n{number}"}), job("stays", principal="stays"))
        queue.take(10, 1)
    names = [queue._principals, *queue._idle.values(), *queue._principals.members.values()]
    assert sum(len(turns._ahead) for turns in names) <= 2 * MAX_REMEMBERED + 8
    assert len(queue._idle) <= MAX_REMEMBERED


events = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "cancel", "purge", "tick"]),
        st.sampled_from(["pa", "pb", "qa"]),
        st.integers(1, 40),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=200, deadline=None)
def test_every_job_leaves_exactly_once_or_was_cancelled(script: list[tuple[str, str, int, int]]) -> None:
    clock = Clock()
    queue = FairQueue(clock)
    added: list[SequenceJob] = []
    left: list[Any] = []
    for action, client, tokens, number in script:
        if action == "add":
            added += fill(queue, job(client[1], tokens, clock.now + number, principal=client[0]))
        elif action == "cancel" and added:
            added[number % len(added)].cancelled = True
        elif action == "purge":
            queue.purge()
        elif action == "tick":
            clock.now += number / 10
        elif action == "take":
            batch, expired = queue.take(50, 5)
            assert len(batch) <= 5
            assert len(batch) == 1 or sum(one.tokens for one in batch) <= 50
            left += batch + expired
    while True:
        batch, expired = queue.take(50, 5)
        if not batch and not expired:
            break
        left += batch + expired
    assert len({id(one) for one in left}) == len(left)
    assert {id(one) for one in added} - {id(one) for one in left} <= {id(one) for one in added if one.cancelled}
    assert (queue.sequences, queue.tokens) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("abc"), st.integers(1, 40)), max_size=8),
    st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_what_comes_before_a_client_is_foretold_by_its_shares(flood: list[tuple[str, str, int]], count: int) -> None:
    queue = FairQueue(Clock())
    for principal, name, waiting in flood:
        fill(queue, *(job(name, 1, principal=principal) for _ in range(waiting)))
    foretold = queue.before(Client("p", "a"), count)
    own = fill(queue, *(job("a", 1, principal="p") for _ in range(count)))
    order = queue.take(10_000, 10_000)[0]
    before = order.index(own[-1]) + 1 - count
    # A job of each other name either way; of each other principal as many more, and one.
    assert abs(before - foretold) <= 2 + 2 * 3
