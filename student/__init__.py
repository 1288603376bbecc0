"""The student: the training loop, one module per stage of a step, one file per published method, and RL plug-ins.

The public interface, imported lazily so that `import student` does not load torch:

    train       run a whole training job from a recipe
    run_eval    evaluate a model on a recipe's held-out prompts
    Recipe      all settings of a job
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Recipe", "run_eval", "train"]

if TYPE_CHECKING:
    from student.commands.api import run_eval, train
    from student.settings.recipe import Recipe

_HOMES = {"Recipe": "student.settings.recipe", "run_eval": "student.commands.api", "train": "student.commands.api"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'student' has no attribute {name!r}")
