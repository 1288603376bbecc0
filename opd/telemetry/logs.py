"""Logs of `opd train` and `opd serve`: standard `logging` on standard error, as text or one JSON object per line.

Modules log a short message and put what varies into `extra`, whose keys become fields of the object.
"""

import logging
import sys
import time
from typing import Any, Literal, TextIO

from pythonjsonlogger.json import JsonFormatter

from opd.printable import LogFormatter, printable

Form = Literal["text", "json"]
_all_json = False
_TALKERS = ("transformers", "huggingface_hub", "datasets", "accelerate")
"""Libraries that give their loggers handlers of their own, whose lines would not be JSON."""


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


class TextLines(LogFormatter):
    """A record as one line of text, with its fields after the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {key: value for key, value in vars(record).items() if key not in _PLAIN and value is not None}
        return super().formatMessage(record) + "".join(f" {key}={value}" for key, value in fields.items())


_PLAIN = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}
"""What every record has."""


class _Propagating(logging.Logger):
    """The logger of a library whose own handlers are not wanted: its records go to those of the root."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Leave the handler out."""

    @property  # of the class, and so above what the library sets on its logger
    def propagate(self) -> bool:  # type: ignore[override]
        """True, whatever is set."""
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass


def configure(
    form: Form, level: str, stream: TextIO | None = None, *, of: str, keep: Any = None, asked: bool = True
) -> None:
    """Log the messages of the loggers below `of` from `level` on, and warnings of all others.

    A full disk or a closed pipe loses the line, but never fails what is being logged.

    Args:
        form: "text", or "json" for one object per line; then also what Python warns of.
        level: debug, info, warning or error.
        stream: standard error if None.
        of: parent of the loggers that log at `level`.
        keep: a filter of records, if any.
        asked: whether the user asked for this form, which then is also that of a command's last error.
    """
    global _all_json  # noqa: PLW0603 - like logging's own configuration
    _all_json = asked and form == "json"
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    if keep is not None:
        handler.addFilter(keep)
    least = getattr(logging, level.upper())
    logging.basicConfig(level=max(least, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(of).setLevel(least)
    logging.captureWarnings(form == "json")
    for name in _TALKERS if form == "json" else ():
        logger = logging.getLogger(name)
        for own in list(logger.handlers):
            logger.removeHandler(own)
        logger.__class__ = _Propagating


def is_json() -> bool:
    """Whether all that this process says on standard error is JSON, as the user asked for."""
    return _all_json


def line(message: str) -> bytes:
    """One line of JSON for what a signal's handler says, past the locks of `logging`."""
    record = logging.LogRecord("opd", logging.WARNING, "", 0, " ".join(message.split()), None, None)
    return f"{JsonLines().format(record)}\n".encode()
