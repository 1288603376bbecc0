"""The spans of a Score call: one for the call, and one for each wait and each forward pass of its sequences.

Spans are written after the call, from clock readings that are taken anyway, so that tracing costs nothing during it.
"""

from collections.abc import Sequence
from typing import Any

from opd.telemetry.tracing import Spans, parent_of
from opd.wire.types import Timings
from teacher_server.batching.queue import JobTimes


def record_call(
    spans: Spans,
    metadata: Any,
    *,
    arrived: float,
    ended: float,
    attributes: dict[str, Any],
    jobs: Sequence[JobTimes] = (),
    timings: Timings | None = None,
    error: str = "",
) -> None:
    """Write the spans of a finished call, as children of the caller's span.

    Args:
        spans: where they go.
        metadata: the call's metadata, with its `traceparent`.
        arrived: when the call came in, in monotonic seconds.
        ended: when it ended, in monotonic seconds.
        attributes: attributes of the call's span: strings and numbers, never prompts.
        jobs: the sequences that the engine has begun, including those that have not ended.
        timings: added as attributes, in seconds.
        error: why the call failed; "" if it did not.
    """
    attributes = dict(attributes)
    if timings is not None:
        for part in ("admission", "queue", "batch_wait", "engine", "encode", "send", "total"):
            attributes[f"opd.{part}_seconds"] = getattr(timings, part)
    inside = spans.add("opd.score", arrived, ended, attributes, parent=parent_of(metadata), error=error)
    forwards: dict[tuple[float, float], int] = {}
    for job in jobs:
        spans.add("queue", job.queued_at, job.picked_at, {"opd.tokens": job.tokens}, parent=inside)
        # The jobs of a batch share one forward pass, which becomes one span.
        times = job.started_at, job.ended_at or ended
        forwards[times] = forwards.get(times, 0) + job.tokens
    for (started, done), tokens in forwards.items():
        spans.add("engine.forward", started, done, {"opd.tokens": tokens}, parent=inside)
