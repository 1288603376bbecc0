"""What state a run is in, of its folder alone: for the report, `opd runs` and `opd watch`."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opd.files import is_locked
from student.run.reading import group, is_number

_GROWING = ("metrics.jsonl", "samples.jsonl", "timeline.json", "checkpoints", "recipe.yaml")
_PATIENCE, _START = 300.0, 1800.0
"""Seconds without a line after which a run counts as stalled: at least, and before its first step."""
_SLOW = 10
"""How many times longer than the longest of the latest steps a step may take."""
EVALUATED = {
    "accuracy": "eval/accuracy",
    "accuracy_half_width": "eval/accuracy_half_width",
    "reverse_kl": "eval/reverse_kl",
    "mean_length": "eval/response_length",
}
"""Figures of an evaluation, by their names in summary.json, with those in metrics.jsonl."""


def status_of(
    run: Path, steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], ending: Mapping[str, Any], planned: Any
) -> dict[str, Any]:
    """How the run goes or ended, with the error that stopped it.

    `how` is "running", "stalled" (its process lives, but nothing has been written for long), "finished", "stopped" or
    "failed" (as it said itself), "killed" (it ended without a word), or "open" where the file system cannot tell.
    """
    how = ending.get("how") or ("finished" if summary else "open")
    if how == "open" or (how == "finished" and not summary):
        writing = is_locked(run / ".lock")
        how = "open" if writing is None else "killed" if not writing else "running"
        if how == "running" and quiet(run) > _patience(steps):
            how = "stalled"
    return {"how": how, "error": ending.get("error") or "", "planned": planned}


def quiet(run: Path) -> float:
    """Seconds since the run last wrote a line or a checkpoint."""
    written = [path.stat().st_mtime for name in _GROWING if (path := run / name).exists()]
    return max(0.0, time.time() - max(written, default=0.0))


def _patience(steps: Sequence[Mapping[str, Any]]) -> float:
    times = [sum(record["seconds"].values()) for record in steps[-_SLOW:] if "seconds" in record]
    return max(_PATIENCE, _SLOW * max(times)) if times else _START


def evaluations(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """Step and figures of each evaluation, of which that of step 0 is the one before training.

    Args:
        steps: records of metrics.jsonl.
        summary: of a finished run, has the evaluations before and after.
    """
    found = [(int(record["step"]), {key: record.get(name) for key, name in EVALUATED.items()}) for record in steps]
    last = int(steps[-1]["step"]) if steps else 0
    found = [(0, group(summary, "before")), *found, (last, group(summary, "after"))]
    known: dict[int, dict[str, float]] = {}
    for step, figures in found:
        if held := {key: value for key in EVALUATED if is_number(value := figures.get(key))}:
            known[step] = known.get(step, {}) | held
    return list(known.items())


def seconds_of(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float:
    """How long the run took, or has taken so far in its steps."""
    whole = summary.get("seconds")
    return whole if is_number(whole) else sum(sum(record.get("seconds", {}).values()) for record in steps)


def now() -> str:
    """The present date and time, UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float) -> str:
    """A time for people."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
