"""The server's logs (`opd.telemetry.logs`), by default as JSON; docs/server.md lists the fields.

Token ids are logged only if `log.prompts` is on, and then only for requests that failed.
"""

import logging
from typing import TextIO

from opd.errors import OpdError, one_line
from opd.telemetry import logs
from opd.telemetry.logs import Form

LOGGER = "teacher_server"
"""The parent of the loggers of all modules of the server."""


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for the traceback that grpcio logs if a caller has left before it could be told how its call ended.

    The call is counted like any other; callers that leave on purpose would otherwise fill the log.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("grpc.") and kind is not None and kind.__name__ == "ExecuteBatchError")


def configure(level: str, stream: TextIO | None = None, form: Form = "json", *, asked: bool = False) -> None:
    """Log the server's messages of `level` and above, and libraries' warnings; see `opd.telemetry.logs.configure`."""
    logs.configure(form, level, stream, of=LOGGER, keep=_is_of_use, asked=asked)


def describe_error(error: Exception) -> str:
    """An error as part of a sentence: the message of one of ours, else the class and the message."""
    text = one_line(error, 300)
    return text if isinstance(error, OpdError) else f"{type(error).__name__}: {text}"
