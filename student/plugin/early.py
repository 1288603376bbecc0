"""The mark of hooks that read no scores; where all have it, learning may begin early (`student.job.learns_early`)."""

from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


def reads_no_scores(hook: Hook) -> Hook:
    """Mark a hook of a term, method, strategy or reward that reads no scores, so that they may arrive after its call.

    An override in a subclass is not marked. A marked hook that returns rows must return the ones it was given.
    """
    hook.reads_no_scores = True  # type: ignore[attr-defined]
    return hook
