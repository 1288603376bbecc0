"""Answers to the same prompts before and after a run, and those of its teacher where they are known, as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.console import Table
from student.run.reading import read_records

_MOST = 120
"""Most characters of a text that are shown."""


def compared(run: Path, count: int = 3, *, teacher: Sequence[Mapping[str, Any]] = ()) -> Table | None:
    """The first answers of a run's first and last evaluation; None for a run without two evaluations.

    Args:
        run: its folder.
        count: number of prompts.
        teacher: the teacher's answers to them, as lines of samples.jsonl.
    """
    lines = read_records(run / "samples.jsonl", [])
    before, after = ([line for line in lines if line.get("label") == label][:count] for label in ("before", "after"))
    if not before or not after:
        return None
    table = Table(title="the same prompts before and after", show_lines=True)
    for name in ("prompt", "before", "after", "teacher" if teacher else "reference"):
        table.add_column(name, overflow="fold")
    for at, (old, new) in enumerate(zip(before, after, strict=False)):
        last = _cut(teacher[at].get("answer") if teacher else old.get("reference"))
        table.add_row(_asked(old), _judged(old), _judged(new), last)
    return table


def _judged(sample: Mapping[str, Any]) -> str:
    """The answer, with its verdict if it is known."""
    verdict = sample.get("verdict")
    return _cut(sample.get("answer")) + (f" ({verdict})" if verdict in ("correct", "wrong") else "")


def _asked(sample: Mapping[str, Any]) -> str:
    """The prompt's text, or the last message of a chat."""
    prompt = sample.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return _cut(last.get("content") if isinstance(last, dict) else last)


def _cut(text: object) -> str:
    said = " ".join(str("" if text is None else text).split())
    return said if len(said) <= _MOST else f"{said[: _MOST - 1]}…"
