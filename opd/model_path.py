"""Can a model's name only be a path? Where that is missing it is refused at once; the hub would be asked for long."""

import logging
from functools import cache
from pathlib import Path

from opd.errors import ConfigError

_log = logging.getLogger(__name__)


def refuse_missing(model: str) -> None:
    """Refuse a name that can only be a folder, and is none.

    The hub's ids are NAME or OWNER/NAME; what begins as a path does, or has more parts, is a path. OWNER/NAME where
    there is a folder OWNER is left to the hub, with a warning: without a network it takes a minute to say no.

    Args:
        model: folder or hub id.

    Raises:
        ConfigError: naming the nearest folder that is there.
    """
    path = Path(model).expanduser()
    if path.exists():
        return
    there = next(parent for parent in path.absolute().parents if parent.is_dir())
    if model.startswith(("/", ".", "~")) or model.strip("/").count("/") > 1:
        raise ConfigError(f"model folder {model} does not exist, though {there} does; give a folder or a hub id.")
    if there == path.absolute().parent != Path.cwd():
        _warn(model, there)


@cache
def _warn(model: str, there: Path) -> None:
    """Once, however often the name is looked at."""
    _log.warning("there is no folder %s, though %s is one; asking the hub for a model of that name", model, there)
