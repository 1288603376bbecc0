"""Every run leaves its report, also when it fails, and nothing about the report can hurt the run."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import student.report.page.page
from student.job.session import train
from student.report.page.page import write_report
from student.report.telemetry import Telemetry
from student.settings.recipe import Recipe


def test_a_run_leaves_its_report_with_exact_divergences_of_tokens(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(train={"steps": 2}, samples={"every": 1, "count": 2}, eval={"prompts": 2})
    train(recipe)
    twin = json.loads((recipe.run / "report.json").read_text())
    assert twin["status"] == {"how": "finished", "error": "", "planned": 2} and twin["problems"] == []
    assert twin["fleet"]["counters"]["rows_answered"] > 0 and twin["fleet"]["replicas"][0]["state"] == "healthy"
    exact, ratios = (next(s for s in twin["samples"] if s["label"] == label) for label in ("after", "train"))
    assert exact["measure"] == "reverse_kl" and ratios["measure"] == "log_ratio"
    for sample in (exact, ratios):
        assert len(sample["pieces"]) == sample["tokens"]
        assert all(len(likely) == 3 for _, _, likely in sample["pieces"])
    # The mean over the tokens is the figure of the whole answer, which the objective's own code computes.
    assert sum(value for _, value, _ in exact["pieces"]) / exact["tokens"] == pytest.approx(exact["kl"], abs=2e-3)
    assert min(value for _, value, _ in exact["pieces"]) >= 0
    assert "<h1>run</h1>" in (recipe.run / "report.html").read_text()


def test_the_report_is_written_anew_at_every_evaluation(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []

    def keep(run: Path) -> None:
        write_report(run)
        kept.append(json.loads((run / "report.json").read_text()))

    monkeypatch.setattr("student.report.telemetry.keep_report", keep)
    recipe = make_recipe(train={"steps": 2}, eval={"prompts": 4, "every": 1})
    train(recipe)
    assert [(twin["status"]["how"], twin["steps"], twin["evaluated"]) for twin in kept] == [
        ("running", 0, 0),
        ("running", 1, 1),
    ]
    assert kept[1]["before"]["accuracy"] == kept[0]["before"]["accuracy"]
    assert {"started", "host", "device"} <= kept[0]["provenance"].keys()


def test_a_run_that_fails_leaves_a_report_that_says_why(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Telemetry.step

    def step(self: Telemetry, number: int, *more: Any) -> None:
        shown(self, number, *more)
        if number == 2:
            raise RuntimeError("the moon is full")

    monkeypatch.setattr(Telemetry, "step", step)
    recipe = make_recipe(eval={"prompts": 0})
    with pytest.raises(RuntimeError):
        train(recipe)
    twin = json.loads((recipe.run / "report.json").read_text())
    assert twin["status"] == {"how": "failed", "error": "RuntimeError: the moon is full", "planned": 4}
    assert twin["steps"] == 2
    assert "Failed after 2 of 4 steps: RuntimeError: the moon is full" in (recipe.run / "report.html").read_text()


def test_a_report_that_cannot_be_written_costs_the_run_nothing(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(student.report.page.page, "write_report", full)
    recipe = make_recipe(train={"steps": 1}, eval={"prompts": 0})
    with caplog.at_level(logging.WARNING):
        assert train(recipe)["steps"] == 1
    assert "could not be written: [Errno 28] No space left on device" in caplog.text
