"""What tests of a failing fleet share: settings with changes, what a replica is, the numbers of a calm fleet."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from opd.fleet.client import TeacherFleet
from opd.fleet.settings import CallSettings, FleetSettings, HealthSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import PayloadSpec, ScoreItem, Scores

SPEC = PayloadSpec.topk(4)


def with_health(settings: FleetSettings, **changes: Any) -> FleetSettings:
    health = HealthSettings.model_validate({**settings.health.model_dump(), **changes})
    return settings.model_copy(update={"health": health})


def with_calls(settings: FleetSettings, **changes: Any) -> FleetSettings:
    return settings.model_copy(
        update={"calls": CallSettings.model_validate({**settings.calls.model_dump(), **changes})}
    )


def state_of(fleet: TeacherFleet, address: str) -> str:
    return next((r.state for r in fleet.status().replicas if r.address == address), "absent")


def reason_of(fleet: TeacherFleet, address: str) -> str:
    return next((r.reason for r in fleet.status().replicas if r.address == address), "absent")


def wait_for_all(fleet: TeacherFleet, *servers: Any) -> None:
    """Until rows may go to every one of these servers: connecting waits for one of them only."""
    wait_until(lambda: all(state_of(fleet, server.address) == "healthy" for server in servers))


def rows_sent(counters: FleetCounters) -> int:
    """What the share of hedges is a share of: rows that went out again, after a failure or a stall, count again."""
    return counters.rows_submitted + counters.reissues + counters.moved


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What gRPC or the fleet logged as an exception."""
    ours = ("grpc", "opd")
    return [r.getMessage() for r in caplog.records if r.exc_info and r.name.startswith(ours)]


def numbers(scores: list[Scores]) -> list[bytes]:
    return [s.sampled.tobytes() + s.values.tobytes() + s.ids.tobytes() for s in scores]  # type: ignore[union-attr]


def calm(tiny: SimpleNamespace, items: list[ScoreItem]) -> list[bytes]:
    model = tiny.model(1)
    found = []
    for item in items:
        want = model.score(item, SPEC, 1.0)
        found.append(want.sampled.tobytes() + want.values.astype(np.float16).tobytes() + want.ids.tobytes())
    return found
