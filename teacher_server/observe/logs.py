"""Logs of a server: the standard `logging`, one JSON object a line on standard error; docs/server.md lists the fields.

Modules log a short fixed message and put what varies into `extra`, whose keys become fields of the object. Token ids
and texts are not logged unless `log.prompts` is on, and then only for requests that failed.
"""

import logging
import sys
import time
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

from opd.errors import OpdError, one_line

LOGGER = "teacher_server"
"""Above the loggers of all modules of the server."""


class JsonLines(JsonFormatter):
    """A record as one line of JSON; a value that is not a JSON type is written as its string."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "exc_info": "trace"},
            json_ensure_ascii=False,
            json_default=str,
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """The record with its level in small letters."""
        return {**log_data, "level": log_data["level"].lower()}


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for the traceback that grpcio logs when a caller has left before it could be told how its call ended.

    The call is counted like any other; callers who leave on purpose would otherwise fill the log.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("grpc.") and kind is not None and kind.__name__ == "ExecuteBatchError")


def configure(level: str, stream: TextIO | None = None) -> None:
    """Write the server's messages of `level` and above, and warnings of libraries, to `stream` or standard error.

    A full disk or a closed pipe costs the line, never the request that is logged.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(_is_of_use)
    least = getattr(logging, level.upper())
    logging.basicConfig(level=max(least, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(LOGGER).setLevel(least)


def describe_error(error: Exception) -> str:
    """An error as part of a sentence: an error of ours speaks for itself, others need their class."""
    text = one_line(error, 300)
    return text if isinstance(error, OpdError) else f"{type(error).__name__}: {text}"
