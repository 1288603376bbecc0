"""The server's logs: standard `logging`, one JSON object per line on standard error; docs/server.md lists the fields.

Modules log a short fixed message and put what varies into `extra`, whose keys become fields of the object. Token ids
are logged only if `log.prompts` is on, and then only for requests that failed.
"""

import logging
import sys
import time
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

from opd.errors import OpdError, one_line
from opd.printable import printable

LOGGER = "teacher_server"
"""The parent of the loggers of all modules of the server."""


class JsonLines(JsonFormatter):
    """A record as one line of JSON; values that are not JSON types are written as strings."""

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

    def format(self, record: logging.LogRecord) -> str:
        """The line, in which controls that JSON leaves as they are have its escapes."""
        return printable(super().format(record), lines=False)

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """The record, with its level in lower case."""
        return {**log_data, "level": log_data["level"].lower()}


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for the traceback that grpcio logs if a caller has left before it could be told how its call ended.

    The call is counted like any other; callers that leave on purpose would otherwise fill the log.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("grpc.") and kind is not None and kind.__name__ == "ExecuteBatchError")


def configure(level: str, stream: TextIO | None = None) -> None:
    """Log the server's messages of `level` and above, and libraries' warnings, to `stream` or standard error.

    A full disk or a closed pipe loses the line, but never fails the request that is being logged.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(_is_of_use)
    least = getattr(logging, level.upper())
    logging.basicConfig(level=max(least, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(LOGGER).setLevel(least)


def describe_error(error: Exception) -> str:
    """An error as part of a sentence: the message of one of ours, else the class and the message."""
    text = one_line(error, 300)
    return text if isinstance(error, OpdError) else f"{type(error).__name__}: {text}"
