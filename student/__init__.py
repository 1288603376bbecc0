"""The student: the training loop, one module per stage of a step, one file per published method, and RL plug-ins.

The public interface, imported lazily so that `import student` does not load torch:

    train       run a whole training job from a recipe
    run_eval    evaluate a model on a recipe's held-out prompts
    session     the parts of a job for a loop of one's own: rollout, score, loss, step, save
    Recipe      all settings of a job
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Recipe", "run_eval", "session", "train"]

if TYPE_CHECKING:
    from student.commands.api import run_eval, session, train
    from student.settings.recipe import Recipe

_HOMES = dict.fromkeys(("run_eval", "session", "train"), "student.commands.api") | {"Recipe": "student.settings.recipe"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'student' has no attribute {name!r}")
