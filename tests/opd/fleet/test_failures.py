"""What goes wrong on real connections, and what the caller sees of it: nothing, or one sentence."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import numpy as np
import pytest
from fleet_cases import SPEC, calm, numbers, reason_of, rows_sent, state_of, wait_for_all, with_calls, with_health
from waiting import PATIENCE

from opd.errors import (
    AuthError,
    DeviceMemoryError,
    IncompatibleTeacherError,
    InvalidRequestError,
    NonFiniteError,
    OpdError,
    OutageError,
    OverloadedError,
    UnavailableError,
    UndecidedTeacherError,
)
from opd.fleet.client import TeacherFleet
from opd.fleet.membership.grpc_link import GrpcLink
from opd.fleet.membership.link import ReplicaRequest
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.scheduling.in_flight import Rpc
from opd.wire.types import ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb


def test_five_per_cent_unavailable_lose_and_change_nothing(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve() for _ in range(3)]
    counter = itertools.count()

    def trouble(request: pb.ScoreRequest) -> None:
        if next(counter) % 20 == 7:
            raise UnavailableError("injected")

    for server in servers:
        server.trouble = trouble
    items = tiny.items(300)
    with TeacherFleet.connect([s.address for s in servers], settings=with_calls(tiny.settings, rows=2)) as fleet:
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        counters = fleet.status().counters
    assert counters.rows_answered == counters.rows_submitted == 300
    assert counters.reissues > 0 and counters.rows_failed == 0


def test_a_killed_server_is_survived_and_its_successor_is_used(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    for server in (one, two):
        server.delay = 0.01
    items = tiny.items(120)
    with TeacherFleet.connect([one.address, two.address], settings=tiny.settings) as fleet:
        wait_for_all(fleet, one, two)
        futures = fleet.submit_many("math", items, SPEC)
        tiny.wait_until(lambda: len(one.requests) > 0)
        one.stop()
        assert numbers(fleet.wait(futures)) == calm(tiny, items)
        tiny.wait_until(lambda: state_of(fleet, one.address) == "dead")
        revived = tiny.serve(port=one.port)
        tiny.wait_until(lambda: state_of(fleet, one.address) == "healthy")
        tiny.wait_until(lambda: fleet.score("math", items, SPEC) and revived.scored_rows() > 0)


def test_a_teacher_that_a_restarted_server_has_yet_to_load_is_awaited_and_not_retired(tiny: SimpleNamespace) -> None:
    one = tiny.serve(names=("math", "code"))
    with TeacherFleet.connect(one.address, settings=tiny.settings) as fleet:
        wait_for_all(fleet, one)
        # Another process, which loads its first teacher and has not come to the second.
        code, one.state = one.models.pop("code"), pb.TEACHER_STATE_LOADING
        one.instance = "restarted"
        tiny.wait_until(lambda: {r.reason for r in fleet.status().replicas} == {"it is still loading"})
        assert {r.state for r in fleet.status().replicas} == {"unverified"}
        one.models["code"] = code
        one.state = pb.TEACHER_STATE_READY
        wait_for_all(fleet, one)
        assert len(fleet.score("code", tiny.items(2), SPEC)) == 2


def test_a_server_restarted_with_other_weights_is_not_readmitted(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    items = tiny.items(40)
    with TeacherFleet.connect([one.address, two.address], settings=tiny.settings) as fleet:
        wait_for_all(fleet, one, two)
        # Of the two, one was compared with the other when it came.
        compared = {r.address for r in fleet.status().replicas if r.agreement_nats is not None}
        one, two = sorted((one, two), key=lambda server: server.address not in compared)
        assert one.address in compared
        one.stop()
        tiny.wait_until(lambda: state_of(fleet, one.address) == "dead")
        other = tiny.serve(seed=2, port=one.port)
        tiny.wait_until(lambda: "weights_hash" in reason_of(fleet, one.address))
        assert state_of(fleet, one.address) == "rejected"
        found = next(r for r in fleet.status().replicas if r.address == one.address)
        assert found.agreement_nats is None, "that of the process before"
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        assert other.scored_rows() == 0


def test_weights_swapped_under_a_running_server_are_noticed_by_the_call(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    items = tiny.items(40)
    with TeacherFleet.connect([one.address, two.address], settings=tiny.settings) as fleet:
        wait_for_all(fleet, one, two)
        one.models["math"] = tiny.model(2)
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        tiny.wait_until(lambda: state_of(fleet, one.address) == "rejected")


def test_adopting_takes_the_new_weights(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    items = tiny.items(3)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        server.models["math"] = tiny.model(2)
        fleet.adopt("math")
        scores = fleet.score("math", items, SPEC)
        assert {s.weights_hash for s in scores} == {tiny.model(2).weights_hash}


def test_a_frozen_server_is_given_up_and_its_rows_go_elsewhere(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    items = tiny.items(60)
    settings = with_health(tiny.settings, ping_timeout_seconds=1.0)
    with TeacherFleet.connect([one.address, two.address], settings=settings) as fleet:
        wait_for_all(fleet, one, two)
        one.deaf = True
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        tiny.wait_until(lambda: state_of(fleet, one.address) == "dead")
        one.deaf = False
        tiny.wait_until(lambda: state_of(fleet, one.address) == "healthy")


def test_a_wedged_server_that_answers_probes_is_given_up_for_its_requests(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    one.wedged = True
    settings = with_calls(tiny.settings, attempt_seconds=0.5, attempts=1000)
    settings = settings.model_copy(update={"hedge": settings.hedge.model_copy(update={"enabled": False})})
    with TeacherFleet.connect([one.address, two.address], settings=settings) as fleet:
        wait_for_all(fleet, one, two)
        items = tiny.items(30)

        def given_up() -> bool:
            assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
            history = fleet._core.monitors[one.address].lives["math"].history
            return any(change.after == "dead" and "requests" in change.reason for change in history)

        tiny.wait_until(given_up)


def test_two_replicas_with_different_weights_and_no_majority_are_refused_for_now(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(seed=1), tiny.serve(seed=2)
    with pytest.raises(UndecidedTeacherError, match=r"not the same.*weights_hash") as caught:
        TeacherFleet.connect([one.address, two.address], settings=tiny.settings)
    assert one.address in str(caught.value) and two.address in str(caught.value)
    assert "alike" not in str(caught.value)
    assert not caught.value.final  # a change of weights may be under way: a job is started again


def test_the_majority_outvotes_an_odd_replica_and_a_pin_outvotes_the_majority(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve(seed=1), tiny.serve(seed=1), tiny.serve(seed=2)]
    addresses = [s.address for s in servers]
    with TeacherFleet.connect(addresses, settings=tiny.settings) as fleet:
        fleet.score("math", tiny.items(30), SPEC)
        assert servers[2].scored_rows() == 0
    pinned = tiny.settings.model_copy(update={"expected_weights": {"math": tiny.model(2).weights_hash}})
    with TeacherFleet.connect(addresses, settings=pinned) as fleet:
        fleet.score("math", tiny.items(30, seed=5), SPEC)
        assert servers[2].scored_rows() == 30
    absent = tiny.settings.model_copy(update={"expected_weights": {"math": "0" * 64}})
    with pytest.raises(IncompatibleTeacherError, match="must have weights 000000000000"):
        TeacherFleet.connect(addresses, settings=absent)


def test_a_replica_that_computes_something_else_under_the_same_hash_is_refused_and_measured(
    tiny: SimpleNamespace,
) -> None:
    servers = [tiny.serve() for _ in range(3)]
    servers[1].models["math"].states += 0.3
    with TeacherFleet.connect([s.address for s in servers], settings=tiny.settings) as fleet:
        tiny.wait_until(lambda: "nats on one row" in reason_of(fleet, servers[1].address))
        assert state_of(fleet, servers[1].address) == "rejected"
        report = fleet.verify("math")
        assert not report.agrees
        assert max(report.differences, key=report.differences.__getitem__) == servers[1].address
        assert report.differences[servers[0].address] == 0.0
        assert servers[1].address in report.sentence()


def test_pushback_is_obeyed_and_costs_no_attempts(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    counter = itertools.count()

    def trouble(request: pb.ScoreRequest) -> None:
        if next(counter) < 10:
            raise OverloadedError("busy", retry_after=0.02)

    server.trouble = trouble
    settings = with_calls(tiny.settings, attempts=1)
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        items = tiny.items(5)
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        assert fleet.status().counters.pushbacks == 10
        assert state_of(fleet, server.address) == "healthy"


def test_an_endless_pushback_is_cut_short_and_counts_as_an_outage(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("opd.fleet.repair.LONGEST_PUSHBACK_SECONDS", 0.5)
    server = tiny.serve()
    heard: list[Outage] = []

    def trouble(request: pb.ScoreRequest) -> None:
        if not heard:
            raise OverloadedError("busy", retry_after=1e12)

    server.trouble = trouble
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        items = tiny.items(2)
        scores = fleet.score("math", items[:1], SPEC, hooks=OutageHooks(waiting=heard.append))
        assert numbers(scores) == calm(tiny, items[:1])
        assert not fleet.outages()
    assert heard and "overloaded" in heard[0].reason and server.address in heard[0].sentence()
    assert any("1e+12 s" in record.getMessage() for record in caplog.records)


def test_refusals_by_every_replica_beyond_the_outage_budget_fail_the_row(tiny: SimpleNamespace) -> None:
    server = tiny.serve()

    def trouble(request: pb.ScoreRequest) -> None:
        raise OverloadedError("busy", retry_after=0.02)

    server.trouble = trouble
    outage = tiny.settings.outage.model_copy(update={"budget_seconds": 0.5})
    settings = tiny.settings.model_copy(update={"outage": outage})
    with (
        TeacherFleet.connect(server.address, settings=settings) as fleet,
        pytest.raises(OutageError, match=r"'math'.*(busy|overloaded)"),
    ):
        fleet.score("math", tiny.items(1), SPEC)


@pytest.mark.parametrize("kind", [InvalidRequestError, NonFiniteError, DeviceMemoryError])
def test_one_bad_row_fails_alone(tiny: SimpleNamespace, kind: type[OpdError]) -> None:
    server = tiny.serve()
    items = [ScoreItem(np.full(6, i, dtype=np.uint32), 2) for i in range(12)]
    bad = items[7].token_ids.tobytes()

    def trouble(request: pb.ScoreRequest) -> None:
        if any(sequence.token_ids == bad for sequence in request.sequences):
            raise kind("this row cannot be scored")

    server.trouble = trouble
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        futures = fleet.submit_many("math", items, SPEC, groups=["g"] * 12)
        for index, future in enumerate(futures):
            if index == 7:
                with pytest.raises(kind, match="cannot be scored"):
                    future.result(timeout=PATIENCE)
            else:
                future.result(timeout=PATIENCE)
        assert state_of(fleet, server.address) == "healthy"


def test_a_draining_server_gets_nothing_new_and_returns_after_it(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    with TeacherFleet.connect([one.address, two.address], settings=tiny.settings) as fleet:
        wait_for_all(fleet, one, two)
        one.draining = True
        tiny.wait_until(lambda: state_of(fleet, one.address) == "retired")
        fleet.score("math", tiny.items(30), SPEC)
        assert one.scored_rows() == 0
        one.draining = False
        tiny.wait_until(lambda: state_of(fleet, one.address) == "healthy")


def test_the_caller_hears_of_an_outage_in_its_own_thread_and_the_rows_survive_it(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    heard: list[tuple[str, int]] = []

    def note(what: str) -> Callable[[Outage], None]:
        return lambda outage: heard.append((what, threading.get_ident()))

    items = tiny.items(10)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        server.stop()
        tiny.wait_until(lambda: state_of(fleet, server.address) == "dead")

        def revive(outage: Outage) -> None:
            heard.append(("emergency", threading.get_ident()))
            assert "math" in outage.sentence() and outage.rows == 10
            tiny.serve(port=server.port)

        hooks = OutageHooks(note("waiting"), revive, note("recovered"))
        assert numbers(fleet.score("math", items, SPEC, hooks=hooks)) == calm(tiny, items)
    names = [what for what, _ in heard]
    assert names.count("emergency") == 1 and "waiting" in names
    assert {thread for _, thread in heard} == {threading.get_ident()}


def test_an_outage_beyond_its_budget_fails_with_its_own_error(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    outage = tiny.settings.outage.model_copy(update={"budget_seconds": 0.5})
    settings = tiny.settings.model_copy(update={"outage": outage})
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        server.stop()
        tiny.wait_until(lambda: state_of(fleet, server.address) == "dead")
        with pytest.raises(OutageError, match=r"'math' .*no usable replica.*dead"):
            fleet.score("math", tiny.items(3), SPEC)


def test_refused_credentials_name_the_replica_and_the_fix(tiny: SimpleNamespace) -> None:
    server = tiny.serve()

    server.refusal = "the token has expired"
    with pytest.raises(AuthError, match=r"expired.*renew the token") as caught:
        TeacherFleet.connect(server.address, settings=tiny.settings)
    assert server.address in str(caught.value)


def test_a_straggler_is_hedged_and_its_call_cancelled(tiny: SimpleNamespace) -> None:
    fast, slow = tiny.serve(), tiny.serve()
    items = tiny.items(200)
    with TeacherFleet.connect([fast.address, slow.address], settings=tiny.settings) as fleet:
        wait_for_all(fleet, fast, slow)
        fleet.score("math", items, SPEC)
        slow.delay = 10 * PATIENCE
        last = tiny.items(40, seed=9)

        def hedged() -> bool:
            assert numbers(fleet.score("math", last, SPEC)) == calm(tiny, last)
            return slow.cancelled > 0 and fleet.status().counters.hedges_won > 0

        tiny.wait_until(hedged, 4 * PATIENCE)
        counters = fleet.status().counters
        assert counters.rows_answered == counters.rows_submitted
        assert 0 < counters.hedges <= max(1, 0.05 * rows_sent(counters))


class SlowProbeLink(GrpcLink):
    """A connection whose self-test takes longer than several descriptions."""

    async def score(
        self, request: ReplicaRequest, timeout: float | None, idle: float
    ) -> AsyncGenerator[tuple[int, Scores], None]:
        if request.check:
            await asyncio.sleep(0.5)
        async for answer in super().score(request, timeout, idle):
            yield answer


def test_a_replica_that_is_described_again_during_its_self_test_can_be_asked_at_once(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    settings = with_health(tiny.settings, revive_seconds=0.02)

    def link(address: str) -> GrpcLink:
        return SlowProbeLink(address, settings.security, settings.calls, "test")

    items = tiny.items(3)
    with TeacherFleet.connect(server.address, settings=settings, link=link) as fleet:
        assert fleet.describe("math").limits.max_k == 32
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)


def test_a_call_that_is_given_up_before_its_first_turn_is_asked_again(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [tiny.serve(), tiny.serve()]
    given_up: list[int] = []
    with TeacherFleet.connect([s.address for s in servers], settings=tiny.settings) as fleet:
        dispatcher = fleet._core.dispatcher
        launch = dispatcher.runner.launch

        def launch_and_lose(rpc: Rpc) -> None:
            launch(rpc)
            if not given_up:  # the loop has not come to the RPC's task yet
                given_up.append(rpc.number)
                dispatcher.lost(fleet._core.monitors[rpc.server.address], rpc.teacher, "it died meanwhile.")

        monkeypatch.setattr(dispatcher.runner, "launch", launch_and_lose)
        items = tiny.items(6)
        found = [future.result(timeout=PATIENCE) for future in fleet.submit_many("math", items, SPEC)]
        assert given_up and numbers(found) == calm(tiny, items)
        assert fleet.status().counters.reissues >= 1
