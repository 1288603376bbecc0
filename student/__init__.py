"""The student: one training loop, a file per stage that it calls, methods (a paper a file) and RL plug-ins.

The public face, imported lazily:

    train       a whole job from a recipe
    run_eval    a model on a recipe's held-out prompts
    Recipe      everything that a job can be told
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Recipe", "run_eval", "train"]

if TYPE_CHECKING:
    from student.api import run_eval, train
    from student.recipe import Recipe

_HOMES = {"Recipe": "student.recipe", "run_eval": "student.api", "train": "student.api"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'student' has no attribute {name!r}")
