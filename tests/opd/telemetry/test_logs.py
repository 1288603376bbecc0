"""Logs as text or as JSON, of ours and of the libraries that would rather print."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from opd.telemetry import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where a test logs; what it configures ends with it."""
    logging.captureWarnings(False)  # as another test may have left it
    root, raises = logging.getLogger(), logging.raiseExceptions
    kept, level = list(root.handlers), root.level
    talkers = [logging.getLogger(name) for name in logs._TALKERS]
    before = [(one, one.__class__, list(one.handlers), one.propagate) for one in talkers]
    yield io.StringIO()
    for one, kind, handlers, propagate in before:
        one.__class__, one.handlers, one.propagate = kind, handlers, propagate
    logging.captureWarnings(False)
    logging.raiseExceptions = raises
    root.handlers[:] = kept
    root.setLevel(level)
    logs._all_json = False


def test_a_line_of_text_has_its_time_and_its_fields(stream: io.StringIO) -> None:
    logs.configure("text", "info", stream, of="student")
    logging.getLogger("student.x").info("listening", extra={"port": 7070})
    line = stream.getvalue()
    assert line[:2] == "20" and line.endswith(" INFO student.x: listening port=7070\n") and not logs.is_json()


def test_a_stream_of_json_holds_nothing_else(stream: io.StringIO) -> None:
    talkative = logging.getLogger("transformers")
    talkative.addHandler(logging.StreamHandler(stream))
    talkative.propagate = False
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.configure("json", "info", stream, of="student")
        talkative.addHandler(logging.StreamHandler(stream))  # as transformers does at its first message
        logging.getLogger("transformers.models").warning("you should probably train this model")
        warnings.warn("past_key_values is deprecated", FutureWarning, stacklevel=1)
    logging.getLogger("student.report").info("step 1/2", extra={"step": 1})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning", "info"]
    assert "FutureWarning" in lines[1]["message"] and lines[2]["step"] == 1 and "time" in lines[2]
    assert logs.is_json()


def test_what_a_handler_of_signals_says_is_a_line_of_json_too() -> None:
    said = logs.line("\nstopping;\nsaved\n")
    assert json.loads(said)["message"] == "stopping; saved" and said.count(b"\n") == 1
