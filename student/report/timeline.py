"""The timeline of a run as a Chrome trace: open timeline.json in https://ui.perfetto.dev or chrome://tracing.

    learner   the stages of a step: rollout or wait_rollout, wait_teacher, learn, after_update, evaluate, checkpoint
    sampler   the steps that are sampled ahead at the same time (train.max_staleness)
    teachers  from the first row of a step that is sent to be scored to the last answer

If the learner's track is mostly waits, the track that it waits for is the bottleneck.
"""

import contextlib
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from opd.files import write_whole

TRACKS = ("learner", "sampler", "teachers")
LIMIT = 20_000
"""Number of the newest events that are kept, about 2.5 MB."""


class Timeline:
    """Collects spans and writes them to a file.

    Args:
        path: timeline.json, which is continued if the run is resumed; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        # Spans are measured by the monotonic clock, and written in wall-clock time, which a resumed run shares.
        self._epoch = time.time() - time.monotonic()
        self._events: deque[dict[str, Any]] = deque(maxlen=LIMIT)
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, KeyError, OSError):  # cut short by a kill
                old = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
                self._events.extend(event for event in old if event["ph"] == "X")

    def add(self, track: str, name: str, begin: float, end: float, **arguments: int) -> None:
        """Add a span to a track; times are seconds of `time.monotonic()`."""
        if self._path is None:
            return
        start = round(1e6 * (self._epoch + begin))
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start,
                "dur": round(1e6 * (end - begin)),
                "pid": 0,
                "tid": TRACKS.index(track),
                "args": arguments,
            }
        )

    def write(self) -> None:
        """Write the file; errors are ignored, because a missing picture must not end a run."""
        if self._path is None:
            return
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(TRACKS)
        ]
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"traceEvents": [*names, *self._events]}))
