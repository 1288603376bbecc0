"""Find forms in what users read that a native reader stumbles over: python scripts/words.py.

User-visible text is the pages of this repository, the descriptions of settings, and the sentences of errors. Prints
each place and exits with 1 when there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED = re.compile(
    r"\b(?:nobody|somebody|whoever|for ever|(?<!the )one that|what became of|for want of|broken off|without end|unsaid"
    r"|mend(?:s|ed)?|parted|to be told from|came to)\b|(?<!there )\bis no (?!longer|more|such|matter|better)"
    r"|\b(?:is|are) none of\b|\bthat (?:is|are) none\b",
    re.IGNORECASE,
)
ERRORS = re.compile(r"Error$|^(?:echo|log|warning|Field|Option|Argument)$")


def in_text(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of a page."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if BANNED.search(line):
            yield number, line.strip()


def in_code(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of strings given to errors, to fields and options, and to what prints."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ERRORS.search(_name(node.func)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and BANNED.search(part.value):
                    yield part.lineno, part.value


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def places() -> Iterator[str]:
    """Every place with such a form."""
    pages = [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    code = [p for room in ("opd", "student", "teacher_server") for p in sorted((ROOT / room).rglob("*.py"))]
    for path in [*pages, *code]:
        for number, text in (in_text if path.suffix == ".md" else in_code)(path):
            yield f"{path.relative_to(ROOT)}:{number}: {text}"


if __name__ == "__main__":
    found = list(places())
    print("\n".join(found))
    sys.exit(bool(found))
