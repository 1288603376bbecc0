"""What the documents tell people to type and to write works."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

import opd.cli
from student.plugin.controllers import CONTROLLERS
from student.plugin.terms import OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/recipes/*.yaml"),
    *ROOT.glob("examples/first-hour/*/*.yaml"),
    *ROOT.glob("deploy/**/*.yml"),
]


def commands() -> list[tuple[str, list[str]]]:
    """Every `opd ...` in code or in a comment, as (page, words)."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        lines += re.findall(r"^(?:    |# +)(.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        found += [(page.name, shlex.split(line, comments=True)) for line in lines if re.match("opd [a-z]", line)]
    return found


@pytest.fixture(scope="module")
def verbs() -> dict[str, set[str]]:
    """Verb or verb and subverb -> its flags."""
    opd.cli._add_verbs()
    known: dict[str, set[str]] = {}
    root = typer.main.get_command(opd.cli.app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        parts = {name: command} | {f"{name} {sub}": inner for sub, inner in getattr(command, "commands", {}).items()}
        known |= {path: {flag for param in inner.params for flag in param.opts} for path, inner in parts.items()}
    return known


def test_every_command_in_the_documents_has_that_verb_and_those_flags(verbs: dict[str, set[str]]) -> None:
    every = commands()
    assert len(every) > 25
    for page, (_, *words) in every:
        path = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in verbs), None)
        assert path is not None, f"{page}: opd {' '.join(words)}"
        unknown = {word.split("=")[0] for word in words if word.startswith("--")} - verbs[path] - {"--help"}
        assert not unknown, f"{page}: opd {' '.join(words)}"


def test_every_objective_and_method_stands_in_the_table_of_methods() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("methods.md", "rl.md"))
    named = {name for line in text.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    assert {entry.name for entry in (*OBJECTIVES, *CONTROLLERS)} <= named


def test_the_python_of_the_quick_start_runs(lone_teacher, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    for there, here in (("runs/demo/world-0", str(world)), ("127.0.0.1:7070", lone_teacher.address)):
        assert there in code
        code = code.replace(there, here)
    exec(compile(code, "quickstart.md", "exec"), {})
    assert capsys.readouterr().out.startswith("tensor([")
