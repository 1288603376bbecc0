"""Worlds of tiny models that are trained from scratch on a CPU, for the demo, the tests and the lab.

from opd_lab.tiny import build_world
world = build_world("worlds/demo", preset="demo", seed=0)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["ModelSummary", "WorldSummary", "build_world"]

if TYPE_CHECKING:
    from opd_lab.tiny.build import build_world
    from opd_lab.tiny.summary import ModelSummary, WorldSummary

_HOMES = {
    "build_world": "opd_lab.tiny.build",
    "ModelSummary": "opd_lab.tiny.summary",
    "WorldSummary": "opd_lab.tiny.summary",
}


def __getattr__(name: str) -> Any:
    # Imported lazily, so that torch is loaded only when a world is built.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opd_lab.tiny' has no attribute {name!r}")
