"""Runs a Score call and accounts for it: metrics, a line in the log, and spans."""

import asyncio
import logging
import time
from typing import Any

from opd.errors import OpdError, OverloadedError, UnavailableError
from opd.telemetry.tracing import trace_id_of, traceparent_of
from opd.wire.types import Timings
from teacher_server.calls.endings import has_left
from teacher_server.calls.score_call import ScoreCall, Shared
from teacher_server.calls.tracing import record_call

_log = logging.getLogger(__name__)


async def serve(shared: Shared, call: ScoreCall, metadata: Any) -> None:
    """Run a call to its end.

    Args:
        shared: what the calls of the server share.
        call: the call.
        metadata: (key, value) pairs that came with it, with its `traceparent`.

    Raises:
        OpdError: a refusal or failure.
    """
    if shared.refusing:
        raise UnavailableError("the server is shutting down and takes no new calls; ask another replica.")
    timings: Timings | None = None
    failure: BaseException | None = None
    shared.scoring += 1
    shared.metrics.calls.inc()
    try:
        timings = await call.run()
    except BaseException as error:
        failure = error
        raise
    finally:
        shared.scoring -= 1
        shared.metrics.calls.dec()
        _account(shared, call, timings, failure, metadata)


def _account(
    shared: Shared, call: ScoreCall, timings: Timings | None, failure: BaseException | None, metadata: Any
) -> None:
    """Records metrics, log line and spans of a call that has ended."""
    metrics = shared.metrics
    # Names that are not served would make the number of label values unbounded.
    known = any(call.teacher == teacher.name for teacher in shared.teachers)
    teacher = call.teacher if known else ""
    code = _code(failure)
    metrics.requests.labels(teacher, call.payload, code).inc()
    metrics.scored_tokens.labels(teacher, call.payload).inc(call.scored_tokens)
    if timings is not None:
        metrics.observe_timings(teacher, call.payload, timings)
    if isinstance(failure, OpdError) and not call.jobs:
        metrics.rejections.labels(teacher, type(failure).__name__).inc()
    ended = time.monotonic()
    fields = {
        "request_id": call.request_id[:128],
        "teacher": call.teacher[:128],
        "payload": call.payload,
        "sequences": call.sequences,
        "scored_tokens": call.scored_tokens,
    }
    if shared.spans.exported:
        record_call(
            shared.spans,
            metadata,
            arrived=call.arrived,
            ended=ended,
            attributes={f"opd.{key}": value for key, value in fields.items()},
            jobs=call.jobs,
            timings=timings,
            error=type(failure).__name__ if failure is not None else "",
        )
    trace_id = trace_id_of(traceparent_of(metadata))
    if trace_id:
        fields["trace_id"] = trace_id
    if isinstance(failure, OpdError):
        # Refusals for overload come by the hundred per second, and are counted.
        level = logging.DEBUG if isinstance(failure, OverloadedError) else logging.WARNING
        fields |= {"error": type(failure).__name__, "text": str(failure)}
        _log.log(level, "request failed", extra=fields | ({"token_ids": call.prompts} if call.prompts else {}))
    elif shared.settings.log.requests:
        _log.info("request", extra={"code": code, "seconds": round(ended - call.arrived, 6), **fields})


def _code(failure: BaseException | None) -> str:
    """The name of the status that a call ends with."""
    if failure is None:
        return "OK"
    if isinstance(failure, OpdError):
        return failure.status or "UNKNOWN"
    return "CANCELLED" if isinstance(failure, asyncio.CancelledError) or has_left(failure) else "UNKNOWN"
