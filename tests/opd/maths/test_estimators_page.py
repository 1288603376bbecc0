"""docs/estimators.md against the script that writes it: every row, and the figures of two columns computed again."""

import ast
import runpy
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/estimators.md"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks/estimators.py"))


@pytest.fixture(scope="module")
def shown():
    """Cells of the table's rows by the estimator's name."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.read_text().splitlines()]
    table = [row for row in rows if len(row) == 8]
    return {row[0]: row for row in table[1:]}


def share(text):
    return 0.0 if text == "0" else float(text.removesuffix(" %")) / 100


def test_the_page_lists_the_estimators_and_notes_of_the_script(script, shown) -> None:
    listed = {e.name: [e.name, e.payload, e.form, e.use, e.test] for e in script["ESTIMATORS"]}
    assert {name: [*row[:3], row[6], row[7].strip("`")] for name, row in shown.items()} == listed
    assert script["NOTES"].strip() in PAGE.read_text()
    assert script["explanation"]() in PAGE.read_text()


def test_every_test_that_the_page_names_exists(script) -> None:
    for name in {e.test for e in script["ESTIMATORS"]} - {"-"}:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests/opd/maths" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.slow
def test_the_pages_figures_are_those_that_the_script_computes(script, shown) -> None:
    """Bias and variance at noise "mid" of every estimator, to the rounding of the page."""
    found = script["figures"](script["NOISE"]["mid"])
    assert len(found) >= 20
    for name, (biases, variances) in found.items():
        bias, variance = (shown[name][column].split(" / ")[1] for column in (3, 4))
        # Two digits below ten per cent, none behind the point above; three behind it for variances.
        assert share(bias) == pytest.approx(median(biases), rel=0.06, abs=1e-9), name
        middle, _, spread = variance.partition(" (")
        assert float(middle) == pytest.approx(median(variances), abs=6e-4), name
        if spread:
            ends = [float(end) for end in spread.removesuffix(")").split(" to ")]
            assert ends == pytest.approx([min(variances), max(variances)], abs=6e-4), name


def test_the_pages_biases_of_a_batch_are_those_that_the_script_computes(script, shown) -> None:
    for estimator in script["ESTIMATORS"]:
        cells = [share(cell) for cell in shown[estimator.name][5].split(" / ")]
        assert cells == pytest.approx(script["batch_biases"](estimator), rel=0.06, abs=1e-9), estimator.name
