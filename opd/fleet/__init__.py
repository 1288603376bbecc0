"""The client of the teacher fleet: `TeacherFleet` and what it is made of.

    with TeacherFleet.connect("localhost:7070") as fleet:
        scores = fleet.score("math", items, PayloadSpec.topk(64))

`client` is the thread-safe interface. `core` does the work on one asyncio loop, with `dispatch` (rows in, scores out)
and `repair` (what follows a failure). Below them, `scheduling/` decides which server gets which row, `membership/`
finds and checks the servers, `record/` stores scores on disk, and `status/` describes the state of the fleet.
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
