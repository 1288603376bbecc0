"""Transcripts of episodes for people: who said what, and how far each turn of the student was from the teacher."""

import json
from typing import Any

import numpy as np

from opd.tasks.environments.base import ENVIRONMENT, PATH
from student.data.needs import TEACHER
from student.data.row import Row


def transcript_of(row: Row, tokenizer: Any) -> dict[str, Any] | None:
    """The transcript of an episode as JSON values; None for a row that is not an episode.

    Returns:
        environment: its name in the prompt. columns: the prompt's other columns for it. ended: how it ended. opening:
        the end of the prompt that the student read, with the first observation. segments: dicts with "who" ("student",
        "environment", or "summary" for a turn of the student that the environment does not see), "start" and "end"
        (tokens of the response), "text", and "kl" (sum of log S - log T over a turn of the student, nats; None if it
        is not known).
    """
    if "ended" not in row.tags or ENVIRONMENT not in row.prompt.extra:
        return None
    scores = next(
        (
            s.sampled
            for (role, _), s in row.signals.items()
            if role.partition("/")[0] == TEACHER and s.sampled is not None
        ),
        None,
    )
    extra = row.prompt.extra
    segments, last = [], 0
    for turn, (start, end) in enumerate([*row.turns, (row.length, row.length)]):
        if last < start:
            segments.append(_segment("environment", last, start, row, tokenizer, None))
        if start < end:
            who = "summary" if turn in row.summaries else "student"
            segments.append(_segment(who, start, end, row, tokenizer, scores))
        last = end
    return {
        "environment": dict(extra[ENVIRONMENT]),
        # What else the environment reads, so that the problem can be played again, whatever its type, as JSON.
        "columns": json.loads(
            json.dumps({k: v for k, v in extra.items() if k not in (ENVIRONMENT, PATH)}, default=str)
        ),
        "ended": row.tags["ended"],
        "opening": tokenizer.decode(row.prompt_ids),
        "segments": segments,
    }


def _segment(
    who: str, start: int, end: int, row: Row, tokenizer: Any, scores: "np.ndarray[Any, Any] | None"
) -> dict[str, Any]:
    kl = None
    if scores is not None:
        ratio = float((row.behaviour_logp[start:end].astype(np.float64) - scores[start:end]).sum())
        kl = round(ratio, 4) if np.isfinite(ratio) else None
    text = tokenizer.decode(row.response_ids[start:end])
    return {"who": who, "start": start, "end": end, "text": text, "kl": kl}
