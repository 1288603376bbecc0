"""The alerts name series, labels and states that exist; promtool runs their own tests where it is installed."""

import re
import runpy
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
    labels = set().union(*(known[name] for name, _ in asked)) | {"instance", "namespace"}
    labels |= {"name", "job_name"} if "node_" in rule["expr"] else set()  # of the exporters' series
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
    places = {rule["annotations"]["runbook_url"] for rule in rules()}
    assert places == {f"https://opd.example.org/operations/#{name}" for name in headings}
    assert set(headings.values()) == {rule["alert"] for rule in rules()}


def test_an_alert_is_described_by_the_first_sentence_of_its_place_there() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for rule in rules():
        (section,) = re.findall(rf"^### {rule['alert']}\n\n(.*?)\n\n", page + "\n\n", re.M | re.S)
        assert " ".join(section.split()).startswith(rule["annotations"]["description"].rstrip(".")), rule["alert"]


def test_the_severities_and_names_are_those_that_alertmanager_routes() -> None:
    routes = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())
    assert {rule["labels"]["severity"] for rule in rules()} == {"critical", "warning", "info"}
    receivers = {receiver["name"] for receiver in routes["receivers"]}
    assert {routes["route"]["receiver"], *(one["receiver"] for one in routes["route"]["routes"])} == receivers
    names = {name for one in routes["inhibit_rules"] for part in one.values() for text in part for name in _names(text)}
    assert names and names <= {rule["alert"] for rule in rules()}


def _names(matcher: str) -> list[str]:
    return matcher.partition('"')[2].rstrip('"').split("|") if "alertname" in matcher else []


def test_alert_board_and_autoscaler_ask_the_same_figure_of_what_waits() -> None:
    figure = runpy.run_path(str(ROOT / "scripts" / "dashboards.py"))["BACKLOG"]
    scaler = yaml.safe_load((ROOT / "deploy/kubernetes/components/autoscaling/scaler.yaml").read_text())
    (grows,) = (rule["expr"] for rule in rules() if rule["alert"] == "TeacherQueueGrows")
    query = re.sub(r"\{[^}]*\}", "", scaler["spec"]["triggers"][0]["metadata"]["query"])
    assert query.split() == figure.split() and " ".join(grows.split()).startswith(figure)


def test_promtool_finds_rules_configuration_and_their_tests_right(promtool: str) -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        subprocess.run([promtool, *arguments], cwd=FOLDER, check=True)
