"""opd: on-policy distillation as a service.

The public interface is small, typed, and imported lazily, so that `import opd` loads neither torch nor gRPC:

    score                                   a teacher's scores of given responses, in one call
    TeacherFleet, PayloadSpec, ScoreItem    the same for programs that score repeatedly
    forward_kl, reverse_kl, jsd             exact divergences from logits, with gradients; more in `opd.maths`
    OpdError                                base class of all errors, whose messages name the fix

`student.train` and `student.run_eval` run whole jobs. docs/library.md has an example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "OpdError",
    "PayloadSpec",
    "ScoreItem",
    "Scores",
    "TeacherFleet",
    "__version__",
    "forward_kl",
    "jsd",
    "reverse_kl",
    "score",
]

if TYPE_CHECKING:
    from opd.errors import OpdError
    from opd.fleet.client import TeacherFleet
    from opd.fleet.one_shot import score
    from opd.maths.exact import forward_kl, jsd, reverse_kl
    from opd.wire.types import PayloadSpec, ScoreItem, Scores

_HOMES = {
    "OpdError": "opd.errors",
    "PayloadSpec": "opd.wire.types",
    "ScoreItem": "opd.wire.types",
    "Scores": "opd.wire.types",
    "TeacherFleet": "opd.fleet.client",
    "forward_kl": "opd.maths.exact",
    "jsd": "opd.maths.exact",
    "reverse_kl": "opd.maths.exact",
    "score": "opd.fleet.one_shot",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
