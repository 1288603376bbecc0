"""docs/estimators.md against the script that writes it: every row, and the figures of one column computed again."""

import runpy
from pathlib import Path

import pytest

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


def test_the_pages_figures_are_those_that_the_script_computes() -> None:
    """The column "mid" of every estimator, to the rounding of the page."""
    script = runpy.run_path(str(ROOT / "benchmarks/estimators.py"))
    rows = [line.strip("|").split(" | ") for line in (ROOT / "docs/estimators.md").read_text().splitlines()]
    shown = {row[0].strip(): [cell.split(" / ")[1] for cell in row[3:5]] for row in rows if len(row) == 7}
    problem = script["Problem"].make(script["NOISE"]["mid"])
    base = next(e for e in script["ESTIMATORS"] if e.name.endswith("policy_gradient"))
    unit = script["moments"](base, problem)[1]
    assert len(script["ESTIMATORS"]) >= 20
    for estimator in script["ESTIMATORS"]:
        bias, variance = script["figures"](estimator, problem, unit)
        text, figure = shown[estimator.name]
        # Two digits below ten per cent, none behind the point above; three behind it for variances.
        assert float(text.removesuffix(" %")) == pytest.approx(100 * bias, rel=0.06, abs=1e-7), estimator.name
        assert float(figure) == pytest.approx(variance, abs=6e-4), estimator.name
