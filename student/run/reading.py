"""Reads the files of a run folder, complete or half written, or made by a stranger.

Damage never raises an error: what cannot be read is left out, and a sentence about it is added to a list of problems.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from opd.config.text import read_yaml
from opd.errors import one_line

_LARGEST = 1e300
"""Magnitude up to which values count as numbers: sums and differences of two stay finite."""
_LONGEST_SECONDS = 1e9
_DEEPEST = 100
"""Levels of nesting, beyond which writers of JSON may fail."""
_DAMAGE = (ValueError, RecursionError, yaml.YAMLError, OSError)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def is_token(piece: Any) -> bool:
    """Whether this is a token of a kept answer: [text, nats or None, [[other text, probability], ...]]."""
    if not isinstance(piece, list) or len(piece) != 3 or not isinstance(piece[2], list):
        return False
    pairs = all(isinstance(pair, list) and len(pair) == 2 and is_number(pair[1]) for pair in piece[2])
    return pairs and isinstance(piece[0], str) and (piece[1] is None or is_number(piece[1]))


def group(held: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of keys; empty if it is missing or not a mapping."""
    found = held.get(name)
    return found if isinstance(found, dict) else {}


def read_recipe(run: Path, problems: list[str]) -> dict[str, Any]:
    """The recipe as plain values, because readers of runs need a few keys and not a valid recipe."""
    return read_mapping(run / "recipe.yaml", problems, read_yaml)


def read_mapping(
    path: Path, problems: list[str], parse: Callable[[str], Any] = json.loads, *, needed: bool = True
) -> dict[str, Any]:
    """A file of keys and values; {} if it cannot be read.

    Args:
        path: the file.
        problems: receives a sentence if the file is damaged, or missing although `needed`.
        parse: parses the text; JSON by default.
        needed: whether every run has this file.
    """
    if not path.exists() and not needed:
        return {}
    try:
        found = parse(_bytes(path).decode("utf-8"))
    except _DAMAGE as error:
        problems.append(_unreadable(path, error))
        return {}
    if _too_deep(found):
        problems.append(f"{path.name} is nested too deep.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} does not hold keys and values.")
        return {}
    return found


def read_records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The complete records of a file of JSON lines; a kill can cut the last one short."""
    try:
        # Bytes end lines at line ends alone; text does at U+2028 too, which answers may hold.
        lines = _bytes(path).splitlines()
    except OSError as error:
        problems.append(_unreadable(path, error))
        return []
    found, damaged = [], 0
    for line in lines:
        record = as_record(line)
        if record is not None:
            found.append(record)
        damaged += record is None and bool(line)
    if damaged:
        problems.append(f"{path.name}: {damaged} damaged line{'s were' if damaged > 1 else ' was'} left out.")
    return found


def _bytes(path: Path) -> bytes:
    """The contents of a plain file: a pipe or a device might have no end.

    Raises:
        OSError: if it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a plain file")
    return path.read_bytes()


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path.name} is missing."
    why = getattr(error, "strerror", None) or one_line(error, 160)
    return f"{path.name} cannot be read: {'it is nested too deep' if isinstance(error, RecursionError) else why}."


def as_record(line: bytes) -> dict[str, Any] | None:
    """A line of JSON as a record; None if it is not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and not _too_deep(record) else None


def _too_deep(value: Any, left: int = _DEEPEST) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_too_deep(one, left - 1) for one in held)


def read_steps(run: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, of which step 0 is the evaluation before the first step; see `as_step`."""
    found = map(as_step, read_records(run / "metrics.jsonl", problems))
    return [record for record in found if record is not None]


def as_step(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A record with its step and, if it has times, possible seconds by stage; None if it has no step."""
    if not is_number(record.get("step")):
        return None
    tidy = {name: value for name, value in record.items() if name != "seconds"}
    if isinstance(record.get("seconds"), dict):
        tidy["seconds"] = {stage: value for stage, value in record["seconds"].items() if _is_time(value)}
    return tidy


def _is_time(value: Any) -> TypeGuard[float]:
    return is_number(value) and 0 <= value <= _LONGEST_SECONDS
