"""A replica that answers checks truthfully and rows with another model is found out by rows that are scored twice."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleet_cases import wait_for_all
from slow_cases import slow
from waiting import PATIENCE

from opd.errors import UnavailableError
from opd.fleet.client import TeacherFleet
from opd.fleet.cross_score import CrossScorer
from opd.fleet.membership.outage import OutageHooks
from opd.fleet.scheduling.in_flight import ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import CallSettings, FleetSettings, HealthSettings, HedgeSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

SPECS = [PayloadSpec.topk(4, "f32"), PayloadSpec.gather(3, "f32"), PayloadSpec.hidden("f32"), PayloadSpec.sampled()]
TOPK = SPECS[0]


def checking(settings: FleetSettings, share: float, **more: Any) -> FleetSettings:
    """Nothing but the answers decides: no check is given up because it takes long, and no row is hedged."""
    health = {"cross_score_share": share, "check_seed": 7, "cross_score_seconds": 10 * PATIENCE, **more}
    update = {"health": settings.health.model_copy(update=health), "hedge": HedgeSettings(enabled=False)}
    return settings.model_copy(update=update)


def truth(tiny: SimpleNamespace, items: list[ScoreItem], spec: PayloadSpec) -> list[bytes]:
    return [numbers(tiny.model(1).score(item, spec, 1.0)) for item in items]


def numbers(scores: Scores) -> bytes:
    parts = (scores.sampled, scores.values, scores.ids, scores.log_tail, scores.hidden)
    return b"".join(part.tobytes() for part in parts if part is not None)


def mislead(server: Any, tiny: SimpleNamespace) -> None:
    """From now on the server answers checks with its model and rows with another one, under its model's name."""
    other = tiny.model(1)
    other.states = other.states + np.float32(0.5)
    server.live_model = other


def state_of(fleet: Any, server: Any) -> str:
    return next(r.state for r in fleet.status().replicas if r.address == server.address)


@pytest.mark.parametrize("spec", [TOPK, *slow(*SPECS[1:])], ids=lambda spec: spec.kind.value)
def test_of_three_replicas_the_one_that_misleads_is_rejected(tiny: SimpleNamespace, spec: PayloadSpec) -> None:
    servers = [tiny.serve() for _ in range(3)]
    mislead(servers[1], tiny)
    items = tiny.items(60, gather=3 if spec.kind.value == "gather" else 0)
    with TeacherFleet.connect([s.address for s in servers], settings=checking(tiny.settings, 1.0)) as fleet:
        wait_for_all(fleet, *servers)  # its checks are truthful
        assert [numbers(s) for s in fleet.score("math", items, spec)] == truth(tiny, items, spec)
        tiny.wait_until(lambda: state_of(fleet, servers[1]) == "rejected")
        rejected = next(r for r in fleet.status().replicas if r.address == servers[1].address)
        reason = rejected.reason
        assert rejected.agreement_nats is None, "it was measured before, on a row that it answered truly"
        counters = fleet.status().counters
        assert "its scores of a row differ by" in reason and servers[0].address in reason
        assert counters.disagreements == 1 and counters.checked_rows >= 60
        assert counters.checked_tokens >= sum(len(item.token_ids) for item in items)
        assert counters.rows_answered == counters.rows_submitted == 60
        seen = servers[1].scored_rows()
        more = tiny.items(20, seed=5, gather=3 if spec.kind.value == "gather" else 0)
        assert [numbers(s) for s in fleet.score("math", more, spec)] == truth(tiny, more, spec)
        assert servers[1].scored_rows() == seen and state_of(fleet, servers[1]) == "rejected"


def test_a_rejected_replica_returns_as_another_process_and_not_before(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve() for _ in range(3)]
    mislead(servers[2], tiny)
    settings, items = checking(tiny.settings, 1.0, ping_timeout_seconds=1.0), tiny.items(30)
    with TeacherFleet.connect([s.address for s in servers], settings=settings) as fleet:
        wait_for_all(fleet, *servers)
        tiny.wait_until(lambda: fleet.score("math", items, TOPK) and state_of(fleet, servers[2]) == "rejected")
        servers[2].deaf = True  # it may die and answer again: that proves nothing
        tiny.wait_until(lambda: state_of(fleet, servers[2]) == "dead")
        servers[2].deaf = False
        tiny.wait_until(lambda: state_of(fleet, servers[2]) == "rejected")
        servers[2].stop()
        honest = tiny.serve(port=servers[2].port)
        tiny.wait_until(lambda: state_of(fleet, servers[2]) == "healthy")
        tiny.wait_until(lambda: fleet.score("math", items, TOPK) and honest.scored_rows() > 0)


def test_two_replicas_in_dispute_serve_nothing_until_one_is_replaced(tiny: SimpleNamespace) -> None:
    honest, liar = tiny.serve(), tiny.serve()
    mislead(liar, tiny)
    items = tiny.items(12)
    heard: list[str] = []
    with TeacherFleet.connect([liar.address, honest.address], settings=checking(tiny.settings, 1.0)) as fleet:

        def waiting(outage: Any) -> None:
            if not heard:
                honest.stop()
                tiny.serve(port=honest.port)
            heard.append(outage.reason)

        wait_for_all(fleet, liar, honest)
        scores = fleet.score("math", items, TOPK, hooks=OutageHooks(waiting=waiting))
        assert [numbers(s) for s in scores] == truth(tiny, items, TOPK)
        assert state_of(fleet, liar) == "rejected" and state_of(fleet, honest) == "healthy"
    assert "no other replica could decide" in heard[0] and liar.address in heard[0] and honest.address in heard[0]


def test_honest_replicas_change_nothing_and_about_the_share_is_scored_twice(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve() for _ in range(2)]
    items = tiny.items(300)
    found = []
    for _ in range(2):
        with TeacherFleet.connect([s.address for s in servers], settings=checking(tiny.settings, 0.1)) as fleet:
            wait_for_all(fleet, *servers)
            assert [numbers(s) for s in fleet.score("math", items, TOPK)] == truth(tiny, items, TOPK)
            counters = fleet.status().counters
            assert counters.rows_answered == 300 and counters.disagreements == 0
            found.append(counters.checked_rows)
    assert found[0] == found[1] and 10 <= found[0] <= 60, "a function of the rows and the seed"


@pytest.mark.parametrize(("replicas", "share"), [(1, 1.0), (2, 0.0)])
def test_without_a_second_replica_or_a_share_nothing_is_scored_twice(
    tiny: SimpleNamespace, replicas: int, share: float
) -> None:
    servers = [tiny.serve() for _ in range(replicas)]
    with TeacherFleet.connect([s.address for s in servers], settings=checking(tiny.settings, share)) as fleet:
        fleet.score("math", tiny.items(20), TOPK)
        assert fleet.status().counters.checked_rows == 0
    assert sum(server.scored_rows() for server in servers) == 20


def test_a_check_that_no_replica_is_left_for_holds_up_no_row(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    for server in (one, two):
        server.delay = 0.2
    with TeacherFleet.connect([one.address, two.address], settings=checking(tiny.settings, 1.0)) as fleet:
        wait_for_all(fleet, one, two)
        items = tiny.items(2)
        futures = fleet.submit_many("math", items, TOPK)
        tiny.wait_until(lambda: bool(two.requests) and bool(one.requests))
        two.stop()
        assert [numbers(s) for s in fleet.wait(futures)] == truth(tiny, items, TOPK)


def test_a_second_replica_that_fails_is_no_witness(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()

    def trouble(request: pb.ScoreRequest) -> None:
        raise UnavailableError("not today")

    two.trouble = trouble
    with TeacherFleet.connect([one.address, two.address], settings=checking(tiny.settings, 1.0)) as fleet:
        wait_for_all(fleet, one, two)
        items = tiny.items(10)
        assert [numbers(s) for s in fleet.score("math", items, TOPK)] == truth(tiny, items, TOPK)
        counters = fleet.status().counters
        assert counters.rows_answered == counters.rows_submitted == 10 and counters.disagreements == 0


def test_the_answer_to_a_check_serves_when_the_row_itself_is_stuck(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    settings = checking(tiny.settings, 1.0, cross_score_seconds=0.5)
    with TeacherFleet.connect([one.address, two.address], settings=settings) as fleet:
        wait_for_all(fleet, one, two)
        one.wedged = True
        items = tiny.items(3)
        assert [numbers(s) for s in fleet.score("math", items, TOPK)] == truth(tiny, items, TOPK)
        assert one.requests, "one of the two tasks of a row went there"


def test_a_row_that_is_withdrawn_while_it_is_held_takes_its_check_with_it(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    two.wedged = True
    with TeacherFleet.connect([one.address, two.address], settings=checking(tiny.settings, 1.0)) as fleet:
        wait_for_all(fleet, one, two)
        future = fleet.submit("math", tiny.items(1)[0], TOPK)
        tiny.wait_until(lambda: bool(one.requests) and bool(two.requests))
        assert future.cancel()
        tiny.wait_until(lambda: all(r.in_flight_rows == 0 for r in fleet.status().replicas))
        counters = fleet.status().counters
        assert counters.rows_cancelled == 1 and counters.rows_answered == 0


class Desk:
    """Takes what a cross-scorer wants done, and does nothing."""

    def __init__(self) -> None:
        self.checks: list[ScoreTask] = []
        self.delivered: list[ScoreTask] = []
        self.again: list[ScoreTask] = []
        self.rejected: set[str] = set()
        self.submit_check = self.checks.append
        self.ask_again = self.again.append

    def withdraw_check(self, task: ScoreTask) -> None: ...

    def deliver_scores(self, task: ScoreTask, scores: Scores) -> None:
        self.delivered.append(task)

    def trusts(self, address: str, teacher: str) -> bool:
        return address not in self.rejected

    def reject(self, address: str, teacher: str, reason: str) -> None:
        self.rejected.add(address)


def test_what_a_replica_said_before_it_was_rejected_does_not_count_once_its_process_is_replaced() -> None:
    desk, scheduler = Desk(), Scheduler(CallSettings())
    for address in "abc":
        scheduler.serve(scheduler.add_server(address), ["t"])
    settings = HealthSettings(cross_score_share=1.0, check_seed=0)
    scorer = CrossScorer(settings, scheduler, FleetCounters(), desk, no_head)
    waits, settled = (ScoreTask(n, "t", ScoreItem(np.arange(4, dtype=np.uint32), 1), SPECS[3]) for n in range(2))
    for row in (waits, settled):
        if row is settled:  # no third replica decides this one: both are rejected
            scheduler.serve(scheduler.servers["c"], ())
        scorer.begin(row)
        row.answered_by, desk.checks[-1].answered_by = "a", "b"
        assert scorer.hold(row, Scores(sampled=np.full(3, -9.0, np.float32)))
        desk.checks[-1].deliver(Scores(sampled=np.full(3, -1.0, np.float32)))
    assert desk.rejected == {"a", "b"} and desk.again == [settled]
    desk.rejected.remove("a")  # restarted
    scorer.sweep(lambda task: True)  # the third replica, which the other row waited for, is given up
    assert desk.again == [settled, waits] and not desk.delivered


async def no_head(teacher: str) -> Head:
    raise AssertionError
