"""Text that others wrote, made safe to print: servers, models, environments, judges, run folders of strangers.

A terminal obeys what it is sent: ESC and the C1 controls change its title, its clipboard and what stands above. Marks
of direction show a line in another order than it has. A line end begins what looks like a line of ours.
"""

import logging
import re
import textwrap
from typing import Any

_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_IN_LINE = re.compile(f"[\\n{_CONTROLS}]")


def printable(text: str, *, lines: bool = True) -> str:
    r"""`text` with what a terminal would obey as visible escapes, which are also those of JSON from \x7f on.

    Args:
        text: anything.
        lines: whether line ends stay.
    """
    return (_UNSAFE if lines else _UNSAFE_IN_LINE).sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return {10: "\\n", 13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}")


def echo(text: Any = "", *, err: bool = False, nl: bool = True) -> None:
    """Print `text`, on standard error if `err`; every command prints by this or by `opd.console.Console`."""
    import typer  # not above: errors are made in programs that print nothing

    typer.echo(printable(str(text)), err=err, nl=nl)


def echo_line(text: str) -> None:
    """Print `text`, which others may have written, as one line."""
    echo(printable(text, lines=False))


class LogFormatter(logging.Formatter):
    """Formats a record so that it cannot look like several: its message is one line, and a traceback is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return printable(super().formatMessage(record), lines=False)

    def formatException(self, ei: Any) -> str:
        """The traceback of a record."""
        return textwrap.indent(printable(super().formatException(ei)), "  ")
