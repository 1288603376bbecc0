"""docs/estimators.md against the script that writes it; its figures take a minute and are left to `make estimators`."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_lists_the_estimators_and_notes_of_the_script() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/estimators.py"))
    page = (ROOT / "docs/estimators.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    shown = [(*row[:3], *row[5:]) for row in rows[1:] if len(row) == 7]
    listed = [(e.name, e.payload, e.form, e.use, e.test) for e in script["ESTIMATORS"]]
    assert [row[:4] for row in shown] == [row[:4] for row in listed]
    assert all(test.strip("`") in (wanted, "-") for (*_, test), (*_, wanted) in zip(shown, listed, strict=True))
    assert script["NOTES"].strip() in page
