"""The dashboards are those of the script, and ask for series and labels that exist."""

import json
import re
import runpy
from pathlib import Path

import pytest

from opd.fleet.membership.life_cycle import ReplicaState

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "dashboards.py"))
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def series() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(opd_\w+)` \| (\w+) \| ([\w, ]*) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name: {label for label in labels.replace(" ", "").split(",") if label} for name, _, labels in rows}


PANELS = [panel for name in ("FLEET_FIGURES", "FLEET", "TRAINING_FIGURES", "TRAINING") for panel in SCRIPT[name]]


@pytest.mark.parametrize("panel", [*PANELS, SCRIPT["TIMELINE"]], ids=lambda panel: panel[0])
def test_a_panel_asks_for_series_and_labels_that_exist(panel: tuple[str, str, str, str]) -> None:
    known = series()
    _, expression, legend, _ = panel
    asked = re.findall(r"\bopd_\w+", expression)
    names = [name if name in known else _SUFFIX.sub("", name) for name in asked]
    assert names and all(name in known for name in names), asked
    labels = set().union(*(known[name] for name in names)) | {"instance", "namespace", "le", "__name__"}
    grouped = re.findall(r"by \(([\w, ]+)\)", expression)
    assert {label.strip() for group in grouped for label in group.split(",")} <= labels
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels


def test_the_files_are_those_of_the_script() -> None:
    for name, text in SCRIPT["files"]().items():
        assert (SCRIPT["FOLDER"] / name).read_text() == text, "run python scripts/dashboards.py"
        panels = json.loads(text)["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(panels)


def test_every_series_of_ours_is_filtered_by_what_is_chosen_and_every_panel_is_described() -> None:
    for text in SCRIPT["files"]().values():
        board = json.loads(text)
        chosen = {variable["name"] for variable in board["templating"]["list"]}
        assert chosen == {"datasource", "namespace", "run", "student", "teacher"}
        for panel in (one for one in board["panels"] if one["type"] != "row"):
            expression = panel["targets"][0]["expr"]
            assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
            assert expression.count('namespace=~"$namespace"') == len(re.findall(r"\bopd_\w+", expression)), expression
            assert set(re.findall(r"\$(\w+)", expression)) <= chosen | {"__rate_interval"}
            assert "[5m]" not in expression


def test_a_board_begins_with_figures_that_have_thresholds_and_ends_with_the_gpus() -> None:
    for text in SCRIPT["files"]().values():
        panels = json.loads(text)["panels"]
        assert [panel["type"] for panel in panels[:5]] == ["stat"] * 5 and panels[-1]["title"].startswith("GPUs")
        assert any("thresholds" in panel["fieldConfig"]["defaults"] for panel in panels[:5])
        numbers = [one["id"] for panel in panels for one in (panel, *panel.get("panels", ()))]
        assert len(set(numbers)) == len(numbers)


def test_the_states_of_the_timeline_are_those_of_replicas() -> None:
    assert set(SCRIPT["STATES"]) | {"retired"} == {str(state) for state in ReplicaState}
