"""Batches that fail: only the guilty sequences' calls do, whatever they shared a batch with."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from waiting import until, wait_until

from opd.errors import DeadlineError, DeviceMemoryError, NonFiniteError, UnavailableError
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.batching.admission import Client
from teacher_server.batching.device import DeviceTurn
from teacher_server.batching.queue import SequenceJob
from teacher_server.batching.worker import AWAY_SECONDS, EngineWorker, out_of_memory
from teacher_server.engines.base import EngineItem

SPEC = PayloadSpec.topk(4, "f32")
GUILTY = 9
"""Prompt length that marks a guilty sequence."""


class OutOfMemoryError(RuntimeError):
    """Has torch's name."""


class Batches:
    """Holds the engine until several calls wait, then lets them meet in one batch that fails as told."""

    def __init__(self, engine: Any, fail: Any) -> None:
        self.seen: list[list[int]] = []
        self.gate = threading.Event()
        self._first = True
        self._fail = fail
        engine.before_score = self.before_score

    def before_score(self, batch: Sequence[Any]) -> None:
        if self._first:
            self._first = False
            self.gate.wait(120)
            return
        self.seen.append([entry.item.prompt_length for entry in batch])
        self._fail(batch)


async def meet(client: Any, batches: Batches, calls: list[Any]) -> list[Any]:
    """Outcomes of calls that share a batch."""
    first = asyncio.create_task(client.score(calls[0][:1], SPEC))
    worker = client.server.shared.teachers.get("t").worker
    await until(lambda: worker.load()[2])
    tasks = [asyncio.create_task(client.score(items, SPEC)) for items in calls]
    await until(lambda: worker.load()[0] == sum(len(items) for items in calls))
    batches.gate.set()
    await first
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await client.settled()
    return [error_from_rpc(o) if isinstance(o, grpc.RpcError) else o for o in outcomes]


def guilty_rows(batch: Sequence[Any]) -> list[int]:
    return [row for row, entry in enumerate(batch) if entry.item.prompt_length == GUILTY]


def equal(client: Any, reference: Any, items: list[Any], outcome: Any) -> bool:
    engine = client.engines["numpy"]
    return all(
        np.array_equal(reference(engine, item, SPEC).values, scores.values)
        for item, scores in zip(items, outcome, strict=True)
    )


async def test_a_sequence_with_nan_fails_its_own_call_only(start: Any, items: Any, reference: Any) -> None:
    client = await start()

    def fail(batch: Sequence[Any]) -> None:
        if guilty_rows(batch):
            raise NonFiniteError("teacher numpy produced NaN or infinity.")

    batches = Batches(client.engines["numpy"], fail)
    mixed = [*items(1, seed=5), *items(1, prompt=GUILTY)]
    calls = [items(2, seed=1), items(1, prompt=GUILTY), items(3, seed=2), mixed]
    outcomes = await meet(client, batches, calls)
    assert [type(outcome) for outcome in outcomes] == [list, NonFiniteError, list, NonFiniteError]
    assert equal(client, reference, calls[0], outcomes[0]) and equal(client, reference, calls[2], outcomes[2])
    assert len(batches.seen[0]) == 8 and all(len(batch) == 1 for batch in batches.seen[1:])


async def test_a_batch_too_large_for_the_device_is_halved_until_it_fits(start: Any, items: Any, reference: Any) -> None:
    client = await start()

    def fail(batch: Sequence[Any]) -> None:
        if len(batch) > 2:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    batches = Batches(client.engines["numpy"], fail)
    calls = [items(2, seed=seed) for seed in range(4)]
    outcomes = await meet(client, batches, calls)
    assert all(equal(client, reference, *pair) for pair in zip(calls, outcomes, strict=True))
    assert [len(batch) for batch in batches.seen] == [8, 4, 2, 2, 4, 2, 2]


async def test_sequences_too_large_for_the_device_never_end_the_server(start: Any, items: Any, reference: Any) -> None:
    client = await start()

    def fail(batch: Sequence[Any]) -> None:
        if guilty_rows(batch):
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    batches = Batches(client.engines["numpy"], fail)
    calls = [items(1, seed=1), *(items(1, prompt=GUILTY, seed=seed) for seed in range(6)), items(1, seed=2)]
    outcomes = await meet(client, batches, calls)
    assert [type(outcome) for outcome in outcomes] == [list, *[DeviceMemoryError] * 6, list]
    assert "15 tokens" in str(outcomes[1]) and "topk" in str(outcomes[1])
    assert equal(client, reference, calls[0], outcomes[0]) and equal(client, reference, calls[-1], outcomes[-1])
    assert not client.server._stop.is_set()


async def test_scores_are_freed_as_they_are_sent_and_not_when_the_call_or_the_next_batch_ends(
    start: Any, items: Any
) -> None:
    client = await start()
    engine, made = client.engines["numpy"], []
    plain = engine.score

    def score(batch: Sequence[Any]) -> Any:
        found = plain(batch)
        made.extend(weakref.ref(scores.values) for scores in found)
        return found

    def alive() -> int:
        return sum(one() is not None for one in made)

    during: list[int] = []

    async def look() -> None:
        during.append(alive())

    engine.score = score
    client.server.points.set("before_trailer", look)
    gc.disable()  # memory that waits for the collector is memory in use
    try:
        await client.score(items(5), SPEC, accept_batches=False)  # each is waited for, as a slow reader's are
        await until(lambda: not alive())
        assert len(made) == 5 and max(during) <= 1
    finally:
        gc.enable()


async def test_an_engine_without_any_memory_left_is_dead(start: Any, items: Any) -> None:
    client = await start()

    def fail(batch: Sequence[Any]) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    outcomes = await meet(client, Batches(client.engines["numpy"], fail), [items(1, seed=seed) for seed in range(5)])
    assert {type(outcome) for outcome in outcomes} == {UnavailableError}
    assert await asyncio.wait_for(client.server.wait(), 120) == 20


async def test_an_engine_server_that_stays_away_is_dead_and_one_that_comes_back_is_not(
    start: Any, items: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start()
    away, later = [True], [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr("teacher_server.batching.worker.time", clock)

    def fail(batch: Sequence[Any]) -> None:
        if away[0]:
            raise UnavailableError("SGLang at http://127.0.0.1:1 cannot be reached.")

    client.engines["numpy"].before_score = fail

    async def refused() -> None:
        with pytest.raises(grpc.RpcError, match="cannot be reached") as caught:
            await client.score(items(2), SPEC)
        assert type(error_from_rpc(caught.value)) is UnavailableError

    for _ in range(5):
        await refused()
    assert not client.server._stop.is_set()
    away[0] = False
    await client.score(items(2), SPEC)
    away[0] = True
    later[0] += AWAY_SECONDS
    await refused()
    assert not client.server._stop.is_set()  # counted from when it went away again
    later[0] += AWAY_SECONDS
    await refused()
    assert await asyncio.wait_for(client.server.wait(), 120) == 20


async def test_a_failed_batch_is_freed_before_it_is_repeated(start: Any, items: Any) -> None:
    client = await start()
    alive: list[int] = []

    class Tensor:
        """Stands for what a forward holds when it fails."""

        count = 0

        def __init__(self) -> None:
            Tensor.count += 1

        def __del__(self) -> None:
            Tensor.count -= 1

    def fail(batch: Sequence[Any]) -> None:
        alive.append(Tensor.count)
        tensor = Tensor()
        if len(batch) > 1:
            raise OutOfMemoryError(f"CUDA out of memory beside {Tensor.count} of {type(tensor).__name__}.")

    await meet(client, Batches(client.engines["numpy"], fail), [items(1, seed=seed) for seed in range(4)])
    assert alive == [0] * 7


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("odd shape"), False),
    ],
)
def test_want_of_memory_is_told_from_other_failures(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected


def test_the_words_of_torch_on_a_cpu_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 56)
    assert out_of_memory(caught.value)


def worker_of(engine: Any, turn: DeviceTurn, on_dead: Any = lambda reason: None) -> EngineWorker:
    return EngineWorker(
        "t",
        engine,
        turn,
        max_batch_tokens=8,
        max_batch_sequences=1,
        post=lambda function: function(),
        on_dead=on_dead,
        on_batch=lambda *_: None,
    )


def job_of(deliver: Any, deadline: float = float("inf")) -> SequenceJob:
    return SequenceJob(EngineItem(ScoreItem(np.zeros(2, np.uint32), 1), SPEC), 2, deadline, Client("p", ""), deliver)


def test_a_dead_engine_that_cannot_be_closed_is_reported_once() -> None:
    class Dead:
        info = SimpleNamespace(weights_hash="")

        def score(self, batch: Sequence[Any]) -> list[Any]:
            raise RuntimeError("CUDA error: the context is lost")

        def close(self) -> None:
            raise RuntimeError("the context is lost")

    reports: list[str] = []
    outcomes: list[Any] = []
    worker = worker_of(Dead(), DeviceTurn(), reports.append)
    answered = threading.Event()

    def deliver(job: Any, result: Any, weights_hash: str) -> None:
        outcomes.append(result)
        answered.set()

    worker.submit([job_of(deliver)])
    assert answered.wait(60)
    assert worker.close(60)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError]
    assert len(reports) == 1 and "CUDA error" in reports[0]


def test_a_worker_goes_on_after_jobs_that_expired_and_an_idle_one_is_not_stalled(numpy_engine: Any) -> None:
    turn, refused = DeviceTurn(), Queue[Any]()
    worker = worker_of(numpy_engine(), turn)
    worker.submit([job_of(lambda job, result, weights_hash: refused.put(result), deadline=0.0)])
    assert type(refused.get(timeout=60)) is DeadlineError
    with turn:
        held = worker.call(lambda engine: engine.model)
        wait_until(lambda: worker.stalled(0.0))  # it waits for the device
    assert held.result(60) == "numpy"
    wait_until(lambda: not worker.stalled(0.0))
    assert worker.close(60)


def test_a_task_that_ends_the_thread_leaves_a_dead_engine(numpy_engine: Any) -> None:
    reports: list[str] = []
    worker = worker_of(numpy_engine(), DeviceTurn(), reports.append)
    with pytest.raises(UnavailableError, match="engine of teacher 't' ended"):
        worker.call(lambda engine: sys.exit(1)).result(60)
    wait_until(lambda: reports)
    assert "SystemExit: 1" in reports[0] and worker.engine.closed


def test_an_engine_that_fails_after_it_has_scored_leaves_no_call_waiting(numpy_engine: Any) -> None:
    class Torn(numpy_engine):  # type: ignore[misc]
        @property
        def info(self) -> Any:
            raise RuntimeError("its process has ended")

    reports, outcomes = [], Queue[Any]()  # type: ignore[var-annotated]
    worker = worker_of(Torn(), DeviceTurn(), reports.append)
    worker.submit([job_of(lambda job, result, weights_hash: outcomes.put(result))])
    assert type(outcomes.get(timeout=60)) is UnavailableError
    wait_until(lambda: reports)
    assert len(reports) == 1 and "its process has ended" in reports[0]


async def test_sequences_without_scores_teach_no_rate_and_count_nowhere(start: Any, items: Any) -> None:
    client = await start()
    engine, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    engine.seconds_per_batch = 0.1
    await client.score(items(4), SPEC)
    known = worker.rate.recent
    assert 0 < known <= 400  # 4 x 10 tokens in a tenth of a second

    def away(batch: Sequence[Any]) -> None:
        raise UnavailableError("SGLang at http://127.0.0.1:1 cannot be reached.")

    engine.before_score = away
    with pytest.raises(grpc.RpcError):
        await client.score(items(4), SPEC)
    assert worker.rate.recent == known
    registry = client.server.shared.metrics.registry
    await until(lambda: registry.get_sample_value("opd_teacher_batches_total", {"teacher": "t"}) == 2)
    for name in ("model_tokens_total", "batch_tokens_sum"):
        assert registry.get_sample_value(f"opd_teacher_{name}", {"teacher": "t"}) == 40
    assert registry.get_sample_value("opd_teacher_batch_sequences_sum", {"teacher": "t"}) == 4


async def test_an_engine_that_slows_down_is_known_by_batches_full_of_short_sequences(start: Any, items: Any) -> None:
    client = await start(limits={"max_batch_sequences": 4})
    worker = client.server.shared.teachers.get("t").worker
    worker.rate.recent = known = 1e9
    await client.score(items(1), SPEC)  # says little of a full batch
    assert worker.rate.recent == known
    await client.score(items(24), SPEC)
    assert worker.rate.recent < known / 2


async def test_no_call_is_refused_for_its_deadline_by_the_speed_of_a_first_small_batch(start: Any, items: Any) -> None:
    client = await start()
    engine, worker = client.engines["numpy"], client.server.shared.teachers.get("t").worker
    engine.seconds_per_batch = 0.05
    await client.score(items(1), SPEC)
    assert worker.rate.recent <= 200  # 10 tokens in a twentieth of a second
    admitted = threading.Event()
    engine.seconds_per_batch, engine.before_score = 0.0, lambda batch: admitted.wait(60)
    calls = [asyncio.create_task(client.score(items(8, rows=300), SPEC, timeout=60.0)) for _ in range(16)]
    # 38,912 tokens: more than three minutes, were the first batch all that there is to know.
    await until(lambda: sum(worker.load()[1:]) >= 38_912 or any(call.done() for call in calls))
    admitted.set()
    assert [len(scores) for scores in await asyncio.gather(*calls)] == [8] * 16
    assert worker.rate.admission == worker.rate.recent
