"""What others wrote is printed without what a terminal would obey."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
from rich.live import Live
from rich.text import Text

from opd.console import Console, Table
from opd.errors import from_status
from opd.printable import LogFormatter, echo, printable

HOSTILE = "a\x1b]0;title\x07\x1b]52;c;aGk=\x1b\\\x1b[2J\x9b31m\u202eb\u2066\ud800\x7f\r"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FORGED = "\n2026-11-27 00:00:00,000 ERROR opd: forged"
ROOT = Path(__file__).parents[2]


def test_controls_and_marks_of_direction_become_visible() -> None:
    shown = printable(HOSTILE)
    assert not OBEYED.search(shown) and shown.startswith(r"a\x1b]0;title\x07") and r"\u202eb" in shown
    assert printable("caf\u00e9\tx\ny") == "caf\u00e9\tx\ny" and printable("x\ny", lines=False) == r"x\ny"


def test_json_stays_json() -> None:
    text = json.dumps({"a": HOSTILE}, ensure_ascii=False)
    assert json.loads(printable(text)) == {"a": HOSTILE}


def test_a_console_prints_no_control_and_no_markup_of_others() -> None:
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=False)
    table = Table()
    table.add_column("[bold]x[/]")
    table.add_row(HOSTILE + FORGED)
    for one in (HOSTILE, Text(HOSTILE), table, "[/closes what is not open] :smile:"):
        console.print(one)
    console.rule(HOSTILE)
    with Live(Text(HOSTILE), console=console, auto_refresh=False):
        pass
    shown = file.getvalue()
    assert not OBEYED.search(shown) and "[/closes what is not open] :smile:" in shown and "[bold]x[/]" in shown
    assert not any(line.startswith("2026-11-27") for line in shown.splitlines())


def test_the_consoles_own_colours_stay() -> None:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard").print(Text("x" + HOSTILE, "red"))
    assert file.getvalue().count("\x1b") == 2


def test_a_log_line_cannot_look_like_two() -> None:
    formatter = LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        raise ValueError(HOSTILE + FORGED)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("opd", logging.WARNING, __file__, 1, "server says %s", (HOSTILE + FORGED,), info)
    first, *rest = formatter.format(record).split("\n")
    assert "forged" in first and any("forged" in line for line in rest)
    assert not OBEYED.search(first + "".join(rest)) and all(line.startswith("  ") for line in rest)


def test_a_servers_error_is_one_line() -> None:
    assert "\n" not in str(from_status("NOT_FOUND", HOSTILE + FORGED))


def test_echo_prints_what_a_terminal_does_not_obey(capsys: pytest.CaptureFixture[str]) -> None:
    echo(HOSTILE, err=True)
    assert capsys.readouterr().err == printable(HOSTILE) + "\n"


def test_every_command_prints_by_these() -> None:
    allowed = {ROOT / "opd" / "printable.py", ROOT / "opd" / "console.py"}
    code = {path for room in ("opd", "student", "teacher_server") for path in (ROOT / room).rglob("*.py")}
    raw = re.compile(r"typer\.echo|rich\.console import .*\bConsole\b|rich\.table import .*\bTable\b")
    assert [path for path in sorted(code - allowed) if raw.search(path.read_text())] == []
