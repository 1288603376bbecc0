"""The criteria of a prompt, which reward `rubric` judges answers by and strategy `rubric_guide` quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opd.errors import DataError, short

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt

FAILED = "rubric/failed/"
"""Prefix of a row's notes: `rubric/failed/k` is 1 for each criterion k that the answer does not meet."""


def criteria_of(prompt: Prompt, column: str) -> list[tuple[str, float]]:
    """(criterion, weight) of a prompt, in the order of its column; a single text is one criterion.

    Raises:
        DataError: if it has none, or an entry is neither a text nor a criterion with a positive weight.
    """
    found = []
    column_value = prompt.extra.get(column) or ()
    for entry in [column_value] if isinstance(column_value, str) else column_value:
        given = entry if isinstance(entry, Mapping) else {"criterion": entry}
        text, weight = given.get("criterion"), given.get("weight", 1.0)
        if not isinstance(text, str) or not isinstance(weight, int | float) or not weight > 0:
            raise DataError(
                f"column {column!r} of {prompt.name} has the entry {short(entry)}; it must be a text, or "
                '{"criterion": text, "weight": number above 0}.'
            )
        found.append((text, float(weight)))
    if not found:
        raise DataError(
            f"{prompt.name} has no column {column!r}, from which its criteria are read; add it to prompts.keep_columns."
        )
    return found
