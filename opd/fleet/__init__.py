"""The client of the teacher fleet: `TeacherFleet` and what it is made of.

    with TeacherFleet.connect("localhost:7070") as fleet:
        scores = fleet.score("math", items, PayloadSpec.topk(64))

The parts, each in a file: `life_cycle` (health of a replica), `scheduler` (who gets which row), `link` (one
replica's channel), `core` (the asyncio heart), `client` (the thread-safe face), and around them discovery, routing,
agreement, the score store, outages, metrics and the status view.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["FleetSettings", "TeacherFleet"]

if TYPE_CHECKING:
    from opd.fleet.client import TeacherFleet
    from opd.fleet.settings import FleetSettings

_HOMES = {"TeacherFleet": "opd.fleet.client", "FleetSettings": "opd.fleet.settings"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opd.fleet' has no attribute {name!r}")
