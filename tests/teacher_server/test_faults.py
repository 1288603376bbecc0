"""Injected faults: each does what it says, from a seed; without a plan nothing happens."""

from typing import Any

import grpc
import pytest
from faults import FaultInjector, FaultPlan, FaultPoints
from waiting import PATIENCE

from opd.errors import ConfigError, CorruptPayloadError, UnavailableError
from opd.fleet.membership.answers import answer_distance
from opd.wire.status import error_from_rpc
from opd.wire.types import Head, PayloadSpec


@pytest.mark.parametrize(
    "spec",
    [
        PayloadSpec.sampled(),
        PayloadSpec.topk(5),
        PayloadSpec.gather(5),
        PayloadSpec.hidden("bf16"),
        PayloadSpec.hidden("f32"),
        PayloadSpec.full(),
    ],
    ids=str,
)
async def test_a_misleading_server_passes_every_check_and_tells_the_truth_where_replicas_are_compared(
    spec: PayloadSpec, start: Any, items: Any, reference: Any
) -> None:
    client = await start(fault="mislead=1")
    engine = client.engines["numpy"]
    asked = items(2, k=5) if spec.kind == "gather" else items(2)
    for item, found in zip(asked, await client.score(asked, spec), strict=True):
        head = Head(engine._head, None, "f32", 1.0, 0.0, "")
        assert answer_distance(item, spec, found, reference(engine, item, spec), head) > 0.25
    (item,) = items(1)
    (found,) = await client.score([item], PayloadSpec.sampled())
    assert (found.sampled == reference(engine, item, PayloadSpec.sampled()).sampled).all()


async def outcome(client: Any, items: Any, spec: PayloadSpec, timeout: float = PATIENCE) -> Exception | None:
    try:
        await client.score(items(2), spec, timeout=timeout)
    except grpc.RpcError as error:
        return error_from_rpc(error)
    except CorruptPayloadError as error:
        return error
    return None


@pytest.mark.parametrize("spec", [PayloadSpec.sampled(), PayloadSpec.topk(5), PayloadSpec.gather(5)], ids=str)
@pytest.mark.parametrize("fault", ["corrupt", "lie", "cut", "unavailable"])
async def test_every_fault_fails_the_call_and_poisons_nothing(
    fault: str, spec: PayloadSpec, start: Any, items: Any
) -> None:
    client = await start(fault=f"{fault}=1")
    asked = (lambda n: items(n, k=5)) if spec.kind == "gather" else items
    error = await outcome(client, asked, spec)
    kind = CorruptPayloadError if fault in ("corrupt", "lie") else UnavailableError
    assert type(error) is kind, error
    await client.settled()


async def test_half_of_the_calls_fail_when_asked_and_the_same_ones_each_time(start: Any, items: Any) -> None:
    async def run() -> list[bool]:
        client = await start(fault="unavailable=0.5,seed=3")
        return [await outcome(client, items, PayloadSpec.sampled()) is None for _ in range(20)]

    first = await run()
    assert first == await run()
    assert 3 < sum(first) < 17


async def test_latency_delays_and_a_hang_ends_at_the_deadline(start: Any, items: Any) -> None:
    client = await start(fault="latency=0.2s")
    timings = (await client.score(items(1), PayloadSpec.sampled()))[0].timings
    assert timings.admission >= 0.19
    client = await start(fault="hang=1")
    error = await outcome(client, items, PayloadSpec.sampled(), timeout=1.0)
    assert error is not None
    assert error.status == "DEADLINE_EXCEEDED"
    await client.settled()


def test_one_key_does_not_shift_the_draws_of_another() -> None:
    alone = FaultInjector(FaultPlan.parse("cut=0.3,seed=5"))
    both = FaultInjector(FaultPlan.parse("cut=0.3,corrupt=0.9,seed=5"))
    assert [alone.draw().cut for _ in range(50)] == [both.draw().cut for _ in range(50)]


@pytest.mark.parametrize("spec", ["x=1", "cut", "cut=2", "cut=-1", "latency=soon", "seed=1.5"])
def test_a_malformed_plan_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        FaultPlan.parse(spec)


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="point"):
        FaultPoints().set_sync("nowhere", lambda: None)
