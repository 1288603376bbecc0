"""Can a model's name only be a path? Where that is missing it is refused at once; the hub would be asked for long."""

import logging
import os
import re
from functools import cache
from pathlib import Path

from opd.errors import ConfigError

_log = logging.getLogger(__name__)
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
"""NAME or OWNER/NAME, as the hub has them."""


def refuse_missing(model: str) -> None:
    """Refuse a name that can only be a folder, and is none, or a folder with weights that may not be read.

    What cannot be an id of the hub is a path. OWNER/NAME where there is a folder OWNER is left to the hub, with a
    warning: without a network it takes a minute to say no.

    Args:
        model: folder or hub id.

    Raises:
        ConfigError: naming the nearest folder that is there, or the file.
    """
    path = Path(model).expanduser()
    # safetensors says of such a file that it does not exist.
    unreadable = next((file for file in path.glob("*.safetensors") if not os.access(file, os.R_OK)), None)
    if unreadable is not None:
        raise ConfigError(f"weights file {unreadable} cannot be read: Permission denied; change its mode or owner.")
    if path.exists():
        return
    there = next(parent for parent in path.absolute().parents if parent.is_dir())
    if _ID.fullmatch(model) is None:
        raise ConfigError(f"model folder {model} does not exist, though {there} does; give a folder or a hub id.")
    if there == path.absolute().parent != Path.cwd():
        _warn(model, there)


@cache
def _warn(model: str, there: Path) -> None:
    """Once, however often the name is looked at."""
    _log.warning("there is no folder %s, though %s is one; asking the hub for a model of that name", model, there)
