"""opd: on-policy distillation as a service.

The public face is small and imported lazily, so that `import opd` needs neither torch nor gRPC:

    from opd import TeacherFleet, PayloadSpec
    from opd.maths import forward_kl, reverse_kl
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["PayloadSpec", "ScoreItem", "Scores", "TeacherFleet", "__version__"]

if TYPE_CHECKING:
    from opd.fleet.client import TeacherFleet
    from opd.wire.types import PayloadSpec, ScoreItem, Scores

_HOMES = {
    "PayloadSpec": "opd.wire.types",
    "ScoreItem": "opd.wire.types",
    "Scores": "opd.wire.types",
    "TeacherFleet": "opd.fleet.client",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opd' has no attribute {name!r}")
