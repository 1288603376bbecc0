"""What a prompt's column asks of its answers: for rewards `checklist` and `rubric`, and strategy `rubric_guide`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opd.errors import DataError, short

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt

FAILED = "rubric/failed/"
"""Prefix of a row's notes: `rubric/failed/k` is 1 for each criterion k that the answer does not meet."""


def entries_of(prompt: Prompt, column: str, reads: str) -> list[Any]:
    """What a prompt's column holds: a list, or a text with one entry per line.

    Raises:
        DataError: if it holds nothing, with `reads`, the clause that says who reads it.
    """
    found = prompt.extra.get(column)
    entries = found.splitlines() if isinstance(found, str) else list(found or [])
    if not entries:
        raise DataError(f"{prompt.name} has no column {column!r}, from which {reads}; add it to prompts.keep_columns.")
    return entries


def criteria_of(prompt: Prompt, column: str) -> list[tuple[str, float]]:
    """(criterion, weight) of a prompt, in the order of its column.

    Raises:
        DataError: if it has none, or an entry is neither a text nor a criterion with a positive weight.
    """
    found = []
    for entry in entries_of(prompt, column, "its criteria are read"):
        given = entry if isinstance(entry, Mapping) else {"criterion": entry}
        text, weight = given.get("criterion"), given.get("weight", 1.0)
        if not isinstance(text, str) or not isinstance(weight, int | float) or not weight > 0:
            raise DataError(
                f"column {column!r} of {prompt.name} has the entry {short(entry)}; it must be a text, or "
                '{"criterion": text, "weight": number above 0}.'
            )
        found.append((text, float(weight)))
    return found
