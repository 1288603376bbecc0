"""Errors of a plug-in's own code become a PluginError that names it, so that a run saves and ends in order.

What a plug-in asks of the loop (samples, scores, a gather) may fail too; that is not the plug-in's error and is left as
it is, and so is a lack of memory.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from opd.errors import OpdError, PluginError

_logger = logging.getLogger(__name__)
_ASKED = ("student.rollout.", "student.scoring.", "student.job.services", "student.model.ranks")
"""Where code stands that plug-ins call to sample, score or gather."""


@contextmanager
def blaming(ranks: int) -> Iterator[None]:
    """Raise an exception from a plug-in's code within the block as a PluginError; its traceback is logged.

    Args:
        ranks: number of ranks. With several, a RuntimeError may be a collective's, which fails when a rank is lost.

    Raises:
        PluginError: in place of an exception that is not an OpdError.
    """
    try:
        yield
    except OpdError:
        raise
    except Exception as error:
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        culprit = None if memory or (ranks > 1 and isinstance(error, RuntimeError)) else _culprit(error)
        if culprit is None:
            raise
        part, hook = culprit
        place = traceback.extract_tb(error.__traceback__)[-1]
        _logger.error("%s failed in %s:", type(part).__name__, hook, exc_info=error)
        raise PluginError(
            f"plug-in {str(part.settings.name)!r} failed in {hook}: {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})."
        ) from error


def _is_asked(module: str) -> bool:
    # What fails in the interface of strategies itself was called wrongly.
    return module.startswith(_ASKED) and module != "student.rollout.sampling"


def _culprit(error: Exception) -> tuple[Any, str] | None:
    """The plug-in whose method the exception comes from, and the first of its methods that was called."""
    frames: list[FrameType] = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    culprit: tuple[Any, str] | None = None
    for frame in reversed(frames):
        part = frame.f_locals.get("self")
        is_plugin = hasattr(type(part), "settings_type") and hasattr(part, "settings")
        if is_plugin:
            if culprit is not None and part is not culprit[0]:
                break
            culprit = (part, frame.f_code.co_name)
        elif culprit is None and _is_asked(frame.f_globals.get("__name__", "")):
            return None
    return culprit
