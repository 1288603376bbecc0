"""ToolRL: how well the tool calls of an answer match reference calls, in [-3, 4].

    S      (J(names) + sum over matched pairs of J(parameter names) + equal values) / (1 + |G| + sum_j |parameters|)
    whole  format + 6 S - 3,    format 1 for at least one call and none that does not parse, else 0

G are the reference calls, J the Jaccard index. Every reference call is matched with at most one of the answer's calls,
best pair first; names must agree. Calls without a match lower J(names). Reference calls are in the prompt's column
`calls`: [{"name": ..., "arguments": {...}}], or its JSON text; a row without them has no reward. Source: the code of
arXiv 2504.13958, qiancheng0/ToolRL.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.errors import DataError, short
from opd.tasks.tools import BadCall, Call, parse_reply
from student.data.needs import Needs
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class ToolRlSettings(RewardSettings):
    """Settings of ToolRL."""

    column: str = Field("calls", description="Kept column with the prompt's reference calls (prompts.keep_columns).")


class ToolRl(Reward[ToolRlSettings]):
    """How well tool calls match reference calls (ToolRL)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text and code"
    by_group = False

    def needs(self) -> Needs:
        """Nothing: no verdicts are read."""
        return Needs(reward="any")

    def bounds(self) -> tuple[float, float]:
        """-3 without a match and without form, 4 for a full match with it."""
        return -3.0, 4.0

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metric matched, the mean of S.

        Raises:
            DataError: for reference calls that are not valid.
        """
        for row in rows:
            reference = reference_calls(row, self.settings.column)
            if reference is None:
                row.reward = None
                continue
            found = parse_reply(row.text).calls
            calls = [call for call in found if isinstance(call, Call)]
            well_formed = bool(found) and not any(isinstance(call, BadCall) for call in found)
            share = match_share(reference, calls)
            row.reward = float(well_formed) + 6.0 * share - 3.0
            self.fire("matched", share)


def match_share(reference: Sequence[Call], calls: Sequence[Call]) -> float:
    """S of the module's formula, in [0, 1]; without reference calls 1 if nothing is called, else 0."""
    if not reference:
        return float(not calls)
    pairs = sorted(
        ((_pair(r, c), i, j) for i, r in enumerate(reference) for j, c in enumerate(calls) if r.name == c.name),
        key=lambda pair: (-pair[0], pair[1], pair[2]),
    )
    # Best pair first: of two calls that resemble one reference call, only the better one is matched with it.
    score, taken, used = jaccard([r.name for r in reference], [c.name for c in calls]), set[int](), set[int]()
    for value, i, j in pairs:
        if i not in taken and j not in used:
            score += value
            taken.add(i)
            used.add(j)
    return score / (1 + len(reference) + sum(len(one.arguments) for one in reference))


def _pair(reference: Call, call: Call) -> float:
    """J(parameter names) plus the number of equal values."""
    equal = sum(
        name in call.arguments and same_value(value, call.arguments[name], call.coerced)
        for name, value in reference.arguments.items()
    )
    return jaccard(list(reference.arguments), list(call.arguments)) + equal


def same_value(wanted: Any, found: Any, coerced: bool) -> bool:
    """Whether an argument equals the reference's; the text of an XML call may be the value itself, or its JSON."""
    if wanted == found or not coerced:
        return bool(wanted == found)
    try:
        return str(wanted) == found or bool(json.loads(found) == wanted)
    except (ValueError, RecursionError):
        return False


def jaccard(one: Sequence[str], other: Sequence[str]) -> float:
    """The Jaccard index of two multisets; 1 if both are empty."""
    a, b = Counter(one), Counter(other)
    return sum((a & b).values()) / (sum((a | b).values()) or 1) if a or b else 1.0


def reference_calls(row: Row, column: str) -> list[Call] | None:
    """The reference calls in a column of the prompt, a list or the JSON text of one; None if it has none.

    Raises:
        DataError: if a call is not {"name": ..., "arguments": {...}}.
    """
    wanted = row.prompt.extra.get(column)
    if wanted is None:
        return None
    calls = _parsed(wanted)
    if not isinstance(calls, list):
        raise DataError(f"column {column!r} of {row.prompt.name} is {short(wanted)}; it must be a list of calls.")
    return [_reference(one, row) for one in calls]


def _reference(one: Any, row: Row) -> Call:
    named = isinstance(one, dict) and isinstance(one.get("name"), str)
    arguments = _parsed(one.get("arguments") or {}) if named else None
    if not isinstance(arguments, dict):
        raise DataError(f"a reference call of {row.prompt.name} is {str(one)[:80]}; it needs a name and arguments.")
    # Parquet gives every call the union of all arguments, with None where a call has none.
    return Call(one["name"], {name: value for name, value in arguments.items() if value is not None})


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
