"""Structured logs: one JSON object a line on standard error, request ids in it, never a prompt.

Field names are those of the call; a value that is no number, boolean or string is written as its string. Token ids
and texts are not logged unless `log.prompts` is on, and then only for requests that failed.
"""

import contextlib
import json
import sys
import threading
import time
from typing import Any, TextIO

from opd.errors import OpdError

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_lock = threading.Lock()


class _State:
    least = LEVELS["info"]
    stream: TextIO | None = None


def configure(level: str, stream: TextIO | None = None) -> None:
    """Write messages of `level` and above to `stream`, standard error when None."""
    _State.least = LEVELS[level]
    _State.stream = stream


def log(level: str, message: str, **fields: Any) -> None:
    """Write one line: time (UTC, seconds), level, message, fields.

    A full disk or a closed pipe costs the line, never the request that is logged.
    """
    if LEVELS[level] < _State.least:
        return
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    entry: dict[str, Any] = {"time": stamp, "level": level, "message": message}
    entry.update((k, v if isinstance(v, int | float | bool | str) else str(v)) for k, v in fields.items())
    line = json.dumps(entry, ensure_ascii=False)
    with _lock, contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        stream = _State.stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()


def describe_error(error: Exception) -> str:
    """An error as part of a sentence: an error of ours speaks for itself, others need their class."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, OpdError) else f"{type(error).__name__}: {text}"
