"""SECURITY.md names tests, and every one of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    files = set(re.findall(r"`([\w/]*test_\w+\.py)`", text))
    names = set(re.findall(r"`(test_\w+)`", text))
    assert len(files) > 10 and len(names) > 20
    assert {file for file in files if not any(path.as_posix().endswith("/" + file) for path in sources)} == set()
    assert {name for name in names if not any(f"def {name}(" in source for source in sources.values())} == set()
