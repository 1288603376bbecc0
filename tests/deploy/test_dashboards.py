"""The dashboards are those of the script, and ask for series and labels that exist."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "dashboards.py"))
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def series() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(opd_\w+)` \| (\w+) \| ([\w, ]*) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name: {label for label in labels.replace(" ", "").split(",") if label} for name, _, labels in rows}


@pytest.mark.parametrize("panel", [*SCRIPT["FLEET"], *SCRIPT["TRAINING"]], ids=lambda panel: panel[0])
def test_a_panel_asks_for_series_and_labels_that_exist(panel: tuple[str, str, str, str]) -> None:
    known = series()
    _, expression, legend, _ = panel
    asked = re.findall(r"\bopd_\w+", expression)
    names = [name if name in known else _SUFFIX.sub("", name) for name in asked]
    assert names and all(name in known for name in names), asked
    labels = set().union(*(known[name] for name in names)) | {"instance", "le", "__name__"}
    grouped = re.findall(r"by \(([\w, ]+)\)", expression)
    assert {label.strip() for group in grouped for label in group.split(",")} <= labels
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels


def test_the_files_are_those_of_the_script() -> None:
    for name, text in SCRIPT["files"]().items():
        assert (SCRIPT["FOLDER"] / name).read_text() == text, "run python scripts/dashboards.py"
        panels = json.loads(text)["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(panels)
