"""The lines that `opd doctor` prints, and the examinations that other packages add to it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

from opd.errors import ConfigError

Level = Literal["ok", "note", "fail"]
GROUP = "opd.examinations"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was examined, how it is, and what to do if it is not well."""

    level: Level
    subject: str
    text: str


def examination(name: str) -> Callable[..., Iterable[Finding]]:
    """An examination of one of the upper packages, by its name in the entry-point group `opd.examinations`.

    Raises:
        ConfigError: if no installed package offers it.
    """
    for point in entry_points(group=GROUP, name=name):
        found: Callable[..., Iterable[Finding]] = point.load()
        return found
    raise ConfigError(f"this installation lacks the check {name!r}; install opd again (`pip install -e .`).")
