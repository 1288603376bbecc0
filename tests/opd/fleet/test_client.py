import asyncio
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fleet_cases import wait_for_all
from waiting import PATIENCE

from opd.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    OpdError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.fleet.client import TeacherFleet
from opd.fleet.core import FleetCore
from opd.fleet.membership import members
from opd.fleet.membership.grpc_link import GrpcLink
from opd.fleet.settings import CallSettings, FleetSettings
from opd.wire.channel import ClientSecurity
from opd.wire.types import PayloadSpec, ScoreItem, Scores

FOREVER = 10 * PATIENCE


def same(one: Scores, other: Scores) -> bool:
    for name in ("sampled", "values", "ids", "log_tail", "hidden"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and a.tobytes() != b.tobytes()):
            return False
    return True


@pytest.mark.parametrize(
    "spec",
    [PayloadSpec.sampled(), PayloadSpec.topk(4, "f32"), PayloadSpec.gather(3, "f32"), PayloadSpec.hidden("f32")],
    ids=lambda spec: spec.kind.value,
)
def test_scores_are_the_models_own_numbers(tiny: SimpleNamespace, spec: PayloadSpec) -> None:
    server = tiny.serve()
    items = tiny.items(12, gather=3 if spec.kind.value == "gather" else 0)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        scores = fleet.score("math", items, spec)
    model = server.models["math"]
    for item, got in zip(items, scores, strict=True):
        want = model.score(item, spec, 1.0)
        assert same(got, want)
        assert got.weights_hash == model.weights_hash


def test_rows_that_are_too_many_bytes_for_one_request_travel_in_several(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.request_bytes = 4096
    items = tiny.items(60, gather=24)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        fleet.score("math", items, PayloadSpec.gather(24))
        counters = fleet.status().counters
    assert counters.calls_failed == 0
    assert max(request.ByteSize() for request in server.requests) <= 4096
    assert max(len(request.sequences) for request in server.requests) > 1


def test_numbers_do_not_depend_on_how_many_replicas_serve(tiny: SimpleNamespace) -> None:
    items = tiny.items(60)
    spec = PayloadSpec.topk(4)
    servers = [tiny.serve() for _ in range(3)]
    with TeacherFleet.connect([servers[0].address], settings=tiny.settings) as fleet:
        alone = fleet.score("math", items, spec)
    with TeacherFleet.connect([s.address for s in servers], settings=tiny.settings) as fleet:
        wait_for_all(fleet, *servers)
        together = fleet.score("math", items, spec)
        assert fleet.status().counters.rows_answered == 60
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert sum(bool(s.requests) for s in servers) > 1


def test_submit_returns_a_future_and_temperature_is_applied(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    item = tiny.items(1)[0]
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        future = fleet.submit("math", item, PayloadSpec.sampled(), temperature=2.0)
        got = future.result(timeout=PATIENCE)
    assert same(got, server.models["math"].score(item, PayloadSpec.sampled(), 2.0))
    assert got.timings.total == 0.5


async def test_ascore_works_from_a_foreign_loop(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    items = tiny.items(5)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        one, two = await asyncio.gather(
            fleet.ascore("math", items, PayloadSpec.sampled()), fleet.ascore("math", items, PayloadSpec.sampled())
        )
    assert all(same(a, b) for a, b in zip(one, two, strict=True))


def test_rows_of_one_group_travel_together(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    items = [ScoreItem(np.arange(10, dtype=np.uint32), 4) for _ in range(64)]
    groups = [f"prompt-{i % 8}" for i in range(64)]
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        fleet.score("math", items, PayloadSpec.sampled(), groups=groups)
    assert server.scored_rows() == 64
    assert len(server.requests) < 40


def test_describe_and_teachers_list_what_is_served(tiny: SimpleNamespace) -> None:
    server = tiny.serve(names=("math", "code"))
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        assert sorted(fleet.teachers()) == ["code", "math"]
        assert fleet.describe("code").vocab_size == 64
        with pytest.raises(TeacherNotFoundError, match=r"'poetry' is not served .*code, math"):
            fleet.describe("poetry")


def test_settling_can_be_given_up(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def forever(self: members.Members, seconds: float) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    def give_up() -> None:
        raise KeyboardInterrupt

    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        monkeypatch.setattr(members.Members, "settle", forever)
        with pytest.raises(KeyboardInterrupt):
            fleet.settle(poll=give_up)
        assert ended.wait(PATIENCE)
        fleet.score("math", tiny.items(2), PayloadSpec.sampled())


def test_a_mapping_limits_a_teacher_to_its_replicas(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(names=("math", "code")), tiny.serve(names=("math", "code"))
    with TeacherFleet.connect({"math": [one.address], "code": [two.address]}, settings=tiny.settings) as fleet:
        fleet.score("math", tiny.items(10), PayloadSpec.sampled())
        fleet.score("code", tiny.items(10), PayloadSpec.sampled())
    assert {request.teacher for request in one.requests} == {"math"}
    assert {request.teacher for request in two.requests} == {"code"}


def test_the_head_is_fetched_once_and_is_the_models(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        head = fleet.head("math")
        assert fleet.head("math") is head
    assert server.heads == 1
    assert np.array_equal(head.weight, server.models["math"].head)


def test_rows_that_can_never_be_scored_are_refused_before_they_are_sent(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    bad = ScoreItem(np.array([1, 2, 64], dtype=np.uint32), 1)
    long = ScoreItem(np.zeros(513, dtype=np.uint32), 1)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        with pytest.raises(InvalidRequestError, match="sequence 0 holds token id 64"):
            fleet.submit("math", bad, PayloadSpec.sampled())
        with pytest.raises(InvalidRequestError, match="sequence 2 holds token id 64"):
            fleet.submit_many("math", [*tiny.items(2), bad], PayloadSpec.sampled())
        with pytest.raises(InvalidRequestError, match="513"):
            fleet.submit("math", long, PayloadSpec.sampled())
        for odd in (np.array([[1, 2, 3]] * 3, np.uint32), np.array([1.5, 2, 3])):
            with pytest.raises(InvalidRequestError, match="whole numbers"):
                fleet.submit("math", ScoreItem(odd, 1), PayloadSpec.sampled())  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="gather_ids must be whole"):
            gather = np.full((2, 1), 0.5)
            fleet.submit("math", ScoreItem(bad.token_ids % 64, 1, gather), PayloadSpec.gather(1))  # type: ignore[arg-type]
        with pytest.raises(TeacherNotFoundError):
            fleet.submit("poetry", tiny.items(1)[0], PayloadSpec.sampled())
    assert server.requests == []


def test_a_list_that_allows_none_of_the_teachers_there_says_so(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    (tmp_path / "list").write_text(f"{server.address} poetry\n")
    with pytest.raises(TeacherNotFoundError, match="still loading"):
        settings = tiny.settings.model_copy(update={"connect_seconds": 0.1})
        TeacherFleet.connect(f"file:{tmp_path / 'list'}", settings=settings)


async def test_a_row_that_comes_while_the_fleet_is_closed_is_refused_and_not_kept_waiting(
    tiny: SimpleNamespace,
) -> None:
    core = FleetCore([], lambda address: GrpcLink(address, ClientSecurity(), CallSettings(), ""), FleetSettings(), "")
    await core.close()
    core.members.pool("math")
    found: list[Scores | OpdError] = []
    task = core.make_task("math", tiny.items(1)[0], PayloadSpec.sampled(), 1.0, "", None, found.append)
    core.dispatcher.submit([task])
    assert [type(one) for one in found] == [UnavailableError]


def test_the_fleet_keeps_no_scores_that_it_has_handed_over(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        gc.disable()  # memory that waits for the collector is memory in use
        try:
            scores = fleet.score("math", tiny.items(20), PayloadSpec.topk(4))
            made = [weakref.ref(one.values) for one in scores]
            del scores
            tiny.wait_until(lambda: not any(one() is not None for one in made))
        finally:
            gc.enable()


def test_a_row_that_misses_its_deadline_fails_and_its_call_is_cancelled(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.wedged = True
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        with pytest.raises(DeadlineError):
            fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled(), deadline=0.2).result(timeout=PATIENCE)
        server.wedged = False
        assert len(fleet.score("math", tiny.items(3), PayloadSpec.sampled())) == 3


def test_deadlines_shorter_than_a_row_takes_are_not_blamed_on_its_replica(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.delay = FOREVER
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        for number in range(tiny.settings.health.request_failures):
            future = fleet.submit("math", tiny.items(1, seed=number)[0], PayloadSpec.sampled(), deadline=0.2)
            with pytest.raises(DeadlineError):
                future.result(timeout=PATIENCE)
        counters = fleet.status().counters
        assert counters.calls_failed == counters.replica_deaths == counters.reissues == 0


def test_who_waits_for_a_row_that_another_withdraws_is_told(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.delay = FOREVER
    with ThreadPoolExecutor(1) as other, TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
        waiting = other.submit(fleet.wait, [future])
        tiny.wait_until(lambda: len(server.requests) == 1)
        future.cancel()
        with pytest.raises(CancelledError):
            waiting.result(timeout=PATIENCE)


def test_who_waits_for_a_row_that_was_withdrawn_before_it_was_sent_is_told(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        assert isinstance(fleet, TeacherFleet)
        entering: list[Callable[[], None]] = []
        monkeypatch.setattr(fleet, "_call_soon", entering.append)
        future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
        monkeypatch.undo()
        future.cancel()
        fleet._call_soon(entering[0])
        assert wait([future], timeout=PATIENCE).done == {future}


def test_a_watcher_that_fails_costs_no_row_its_scores(tiny: SimpleNamespace) -> None:
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        fleet.observe(lambda teacher, seconds: 1 / 0)  # type: ignore[arg-type,return-value]
        assert fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled()).result(timeout=PATIENCE)


def test_cancelling_a_future_withdraws_the_row(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.delay = FOREVER
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
        tiny.wait_until(lambda: len(server.requests) == 1)
        assert future.cancel()
        tiny.wait_until(lambda: server.cancelled == 1)
        assert fleet.status().counters.rows_cancelled == 1


def test_a_closed_fleet_says_so_and_fails_what_waits(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.delay = FOREVER
    fleet = TeacherFleet.connect(server.address, settings=tiny.settings)
    future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
    fleet.close()
    fleet.close()
    with pytest.raises(UnavailableError, match="closed"):
        future.result(timeout=PATIENCE)
    with pytest.raises(UnavailableError, match="closed"):
        fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())


def test_lists_and_numbers_of_numpy_ask_for_the_same_scores(tiny: SimpleNamespace) -> None:
    (item,) = tiny.items(1)
    loose = ScoreItem(item.token_ids.tolist(), np.int64(item.prompt_length))  # type: ignore[arg-type]
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        (one,) = fleet.score("math", [item], PayloadSpec.topk(4))
        (other,) = fleet.score("math", [loose], PayloadSpec("topk", np.int64(4)))  # type: ignore[arg-type]
        assert same(one, other)
        for odd in ([1, -2, 3], [1, 2.5, 3], ["1", "2", "3"]):
            with pytest.raises(InvalidRequestError, match=r"whole numbers|token id -2"):
                fleet.score("math", [ScoreItem(odd, 1)], PayloadSpec.sampled())  # type: ignore[arg-type]


def test_what_is_no_whole_number_is_refused_where_it_is_written_and_not_blamed_on_a_server() -> None:
    ids = np.zeros(4, np.uint32)
    for make in (lambda: ScoreItem(ids, 2.0), lambda: ScoreItem(ids, "2"), lambda: PayloadSpec.topk(4.0)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="interpreted as an integer"):
            make()


def test_a_forked_child_is_told_to_connect_and_leaves_its_parents_fleet_alone(tiny: SimpleNamespace) -> None:
    items = tiny.items(2)
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends a child that hangs
            for call in (fleet.status, lambda: fleet.score("math", items, PayloadSpec.sampled()), fleet.close):
                try:
                    call()
                except UnavailableError as error:
                    os.write(write, f"{error}\n".encode())
            os.write(write, b"left")
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            *refused, last = said.read().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        assert last == "left" and len(refused) == 2 and all("connect in each process" in text for text in refused)
        assert len(fleet.score("math", items, PayloadSpec.sampled())) == 2
        with pytest.raises(TypeError, match="connect there"):
            pickle.dumps(fleet)


def test_a_thread_that_waits_in_a_fleet_is_told_when_another_closes_it(tiny: SimpleNamespace) -> None:
    fleet = TeacherFleet.connect(tiny.serve().address, settings=tiny.settings)
    assert isinstance(fleet, TeacherFleet)
    waits = threading.Event()

    async def never() -> None:
        waits.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet._run, never())
        assert waits.wait(PATIENCE)
        fleet.close()
        with pytest.raises(UnavailableError, match="closed"):
            waiting.result(timeout=PATIENCE)


def test_an_unreachable_address_is_one_sentence_with_the_address(tiny: SimpleNamespace) -> None:
    settings = tiny.settings.model_copy(update={"connect_seconds": 0.5})
    with pytest.raises(UnavailableError, match=r"no teacher server answers.*127\.0\.0\.1:1 "):
        TeacherFleet.connect("127.0.0.1:1", settings=settings)


def test_an_unknown_teacher_in_the_mapping_is_named(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    settings = tiny.settings.model_copy(update={"connect_seconds": 0.1})
    with pytest.raises(TeacherNotFoundError, match="'poetry' is not served"):
        TeacherFleet.connect({"poetry": [server.address]}, settings=settings)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "host:99999", "file:", "http://host:7070"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        TeacherFleet.connect(endpoint)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("spec", [PayloadSpec.topk(4), PayloadSpec.hidden("f32"), PayloadSpec.hidden("bf16")], ids=str)
def test_results_become_tensors_without_a_copy(tiny: SimpleNamespace, spec: PayloadSpec) -> None:
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        (scores,) = fleet.score("math", tiny.items(1), spec)
    arrays = [a for a in (scores.sampled, scores.values, scores.ids, scores.log_tail, scores.hidden) if a is not None]
    assert arrays
    for array in arrays:
        assert torch.from_numpy(array).data_ptr() == array.ctypes.data and not array.flags.owndata
    if scores.hidden is not None and scores.hidden.dtype == np.uint16:
        assert torch.from_numpy(scores.hidden).view(torch.bfloat16).isfinite().all()


def test_whoever_waits_for_a_server_is_told_for_which(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SILENT_SECONDS", 0.0)
    with pytest.raises(UnavailableError):
        TeacherFleet.connect("127.0.0.1:9", settings=FleetSettings(connect_seconds=0.1))
    assert caplog.messages.count("waiting for 127.0.0.1:9, up to 0.1 s") == 1
