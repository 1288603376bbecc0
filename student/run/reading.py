"""Reads the files of a run folder, complete or half written.

Damage never raises an error: what cannot be read is left out, and a sentence about it is added to a list of problems.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from opd.config.text import read_yaml


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
    if not path.exists():
        if needed:
            problems.append(f"{path.name} is missing.")
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, OSError) as error:
        problems.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:160]}.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} does not hold keys and values.")
        return {}
    return found


def read_records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The complete records of a file of JSON lines; a kill can cut the last one short."""
    if not path.exists():
        problems.append(f"{path.name} is missing.")
        return []
    found, damaged = [], 0
    for line in path.read_bytes().splitlines():
        record = as_record(line)
        if record is not None:
            found.append(record)
        damaged += record is None and bool(line)
    if damaged:
        problems.append(f"{path.name}: {damaged} damaged line{'s were' if damaged > 1 else ' was'} left out.")
    return found


def as_record(line: bytes) -> dict[str, Any] | None:
    """A line of JSON as a record; None if it is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_steps(run: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; see `as_step`."""
    found = map(as_step, read_records(run / "metrics.jsonl", problems))
    return [record for record in found if record is not None]


def as_step(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A record with its step and, if it has times, finite seconds by stage; None if it has no step."""
    if not is_number(record.get("step")):
        return None
    tidy = {name: value for name, value in record.items() if name != "seconds"}
    if isinstance(record.get("seconds"), dict):
        tidy["seconds"] = {stage: value for stage, value in record["seconds"].items() if is_number(value)}
    return tidy
