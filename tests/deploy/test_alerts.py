"""The alerts name series, labels and states that exist; promtool runs their own tests where it is installed."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.fleet.membership.life_cycle import ReplicaState
from opd.wire.v1 import teacher_pb2 as pb

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series() -> dict[str, set[str]]:
    """Labels of each documented series; a test of its own keeps the page equal to the code."""
    rows = re.findall(r"^\| `(opd_\w+)` \| \w+ \| ([\w, ]*) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name: {label for label in labels.replace(" ", "").split(",") if label} for name, labels in rows}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_series_and_labels_that_exist(rule: dict[str, Any]) -> None:
    known = series()
    asked = re.findall(r"\b(opd_\w+)(?:\{(\w+))?", rule["expr"])
    if not asked and re.search(r"\b(up|node_\w+|kube_\w+)\{", rule["expr"]):
        return  # Prometheus' own, or of the exporters of machines and clusters
    assert asked and all(name in known for name, _ in asked), asked
    assert all(not label or label in known[name] for name, label in asked)
    labels = set().union(*(known[name] for name, _ in asked)) | {"instance"}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels


def test_the_states_that_alerts_ask_for_exist() -> None:
    of_teachers = {name.removeprefix("TEACHER_STATE_").lower() for name, _ in pb.TeacherState.items()}
    found = {rule["alert"]: re.findall(r'state=~?"([\w|]+)"', rule["expr"]) for rule in rules()}
    assert set(found["TeacherFailed"][0].split("|")) <= of_teachers
    assert set(found["ReplicaOutOfPool"][0].split("|")) <= {str(state) for state in ReplicaState}


def test_every_alert_has_a_test_that_fires_it() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules()}


def test_every_alert_has_a_test_in_which_it_is_silent() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    silent = {case["alertname"] for test in tests for case in test["alert_rule_test"] if not case.get("exp_alerts")}
    assert silent == {rule["alert"] for rule in rules()}


def test_every_alert_leads_to_its_place_in_the_operations_guide() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    headings = {heading.lower(): heading for heading in re.findall(r"^### (\w+)$", page, re.M)}
    assert {rule["annotations"]["runbook"] for rule in rules()} == {f"docs/operations.md#{name}" for name in headings}
    assert set(headings.values()) == {rule["alert"] for rule in rules()}


def test_promtool_finds_rules_configuration_and_their_tests_right(promtool: str) -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        subprocess.run([promtool, *arguments], cwd=FOLDER, check=True)
