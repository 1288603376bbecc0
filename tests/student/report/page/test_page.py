"""The report is made of whatever a run folder holds, and says what is missing."""

import json
import re
import resource
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import RECIPE, answer, folder, step

from opd.errors import RunFolderError
from student.report.page.chart import number, ticks
from student.report.page.page import LIMIT_BYTES, write_report

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page; fails on tags that are not closed, scripts and anything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.reached = 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert tag not in ("script", "link", "img", "iframe", "form") and "src" not in found
        assert not any(name.startswith("on") for name in found)
        if tag == "a":
            self.links.add(found["href"] or "")
        self.ids |= {found["id"] or ""} if "id" in found else set()
        self.reached += found.get("tabindex") == "0"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def made(path: Path) -> tuple[Page, dict[str, Any], str]:
    page = write_report(path)
    text = page.read_text()
    assert len(text.encode()) < LIMIT_BYTES and not re.search(r"https?://|url\(|@import", text)
    return Page(text), json.loads(page.with_suffix(".json").read_text()), text


def test_a_finished_run_is_shown_whole(tmp_path: Path) -> None:
    path = folder(tmp_path / "run")
    report = {"accuracy": 0.8, "accuracy_half_width": 0.05, "reverse_kl": 0.02, "mean_length": 6.0}
    (path / "summary.json").write_text(
        json.dumps({"before": report | {"accuracy": 0.25}, "after": report, "seconds": 9})
    )
    fleet = {"counters": {"hedges": 3}, "teachers": [], "silent": [], "replicas": []}
    (path / "ending.json").write_text(json.dumps({"how": "finished", "error": "", "fleet": fleet}))
    page, twin, text = made(path)
    assert "Finished: 40 steps." in page.text and "0.25 → 0.8" in page.text and "± 0.05 (95 %)" in page.text
    assert {link[1:] for link in page.links} <= page.ids
    assert {chart["title"] for chart in twin["curves"]} >= {"Divergence to the teacher", "Accuracy", "Loss by term"}
    accuracy = next(c for c in twin["curves"] if c["title"] == "Accuracy")["series"][0]
    assert accuracy["x"] == [0, 10, 20, 30, 40] and accuracy["y"][0] == 0.25 and accuracy["half"][1] == 0.1
    assert twin["stages"]["total"] == {"rollout": 40.0, "learn": 20.0}
    assert twin["costs"] == [{"purpose": "train", "kind": "sampled_tokens", "tokens": 4000.0}]
    assert "Never acted: clipped_share" in page.text and "hedges" in page.text
    # Text of models is text, never markup, and the notable tokens are there for keyboard and screen reader.
    assert "1 < 2 & 3?" in page.text and "<b>&" not in text and page.reached >= 4 * 5
    assert 'data-t="-0.70 nats; teacher: &#39;&lt;i&gt;&#39; 90%, &#39;x&#39; 5%"' in text
    assert twin["problems"] == []


def test_a_half_written_folder_is_reported_with_what_is_missing(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", steps=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reverse_')
    (path / "samples.jsonl").unlink()
    (path / "provenance.json").write_text("{")
    page, twin, _ = made(path)
    assert twin["steps"] == 3 and twin["status"]["how"] == "open"
    assert "metrics.jsonl: 1 damaged line was left out." in page.text
    assert "samples.jsonl is missing." in page.text and "provenance.json cannot be read" in page.text
    assert "Not ended: 3 of 40 steps" in page.text


def test_a_folder_with_few_and_unknown_keys_is_reported(tmp_path: Path) -> None:
    """No tokens in samples, no times, no ending, other keys in the recipe, NaN among the figures."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.yaml").write_text("student: models/a\nsteps: 5\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "kl": 0.5, "loss": NaN}\n{"step": 2, "kl": 0.4}\n')
    (path / "samples.jsonl").write_text(
        '{"label": "after", "prompt": [{"role": "user", "content": "hi"}], "answer": "ho"}\n'
    )
    (path / "summary.json").write_text('{"after": null}')
    page, twin, _ = made(path)
    assert "Finished: 2 steps." in page.text and "user: hi" in page.text and "ho" in page.text
    assert [figure["name"] for figure in twin["figures"]] == ["kl"]


def test_a_run_without_a_step_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.yaml").write_text(RECIPE)
    page, _, _ = made(path)
    assert "No step is written." in page.text and "No answer is written." in page.text


def test_too_many_long_answers_are_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("student.report.page.page.LIMIT_BYTES", 500_000)
    path = folder(tmp_path / "run", steps=1, samples=[answer(i, "before", 1000) for i in range(8)])
    page, twin, _ = made(path)
    assert re.search(r"\d answers are left out", page.text)
    assert len(twin["samples"]) == 8


def test_answers_to_one_prompt_stand_beside_each_other(tmp_path: Path) -> None:
    trained = [{**answer(0, "train"), "step": 40}, {**answer(0, "train"), "step": 40}]
    lines = [answer(i, label) for label in ("before", "after") for i in range(6)] + trained
    page, _, text = made(folder(tmp_path / "run", samples=lines))
    groups = re.findall(r'<div class="answers">(.*?)</article>', text, re.DOTALL)
    assert [len(re.findall(r"<h3>", group)) for group in groups] == [2] * 7, "the step's two are of one prompt too"
    assert all(group.index("before") < group.index("after") for group in groups[:6])
    assert "3 more prompts" in page.text, "which are folded"


def test_a_metric_that_a_term_names_has_a_chart_of_its_own_unless_another_shows_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", steps=1)
    (path / "shown.json").write_text('{"mine": ["own/mine", "mine"], "skewed": ["skew_forward_kl"]}')
    (path / "metrics.jsonl").write_text('{"step": 1, "mine": 2.0, "skew_forward_kl": 0.5}\n')
    _, twin, _ = made(path)
    charts = {chart["title"]: [series["name"] for series in chart["series"]] for chart in twin["curves"]}
    assert charts["Shown by the terms"] == ["mine"]
    assert "skew_forward_kl" in charts["Divergence to the teacher"]


def test_a_long_run_is_thinned_to_means(tmp_path: Path) -> None:
    _, twin, _ = made(folder(tmp_path / "run", steps=1000))
    kl = twin["curves"][0]["series"][0]
    assert len(kl["x"]) == 200 and kl["x"][-1] == 1000
    assert kl["y"][0] == pytest.approx(np.mean([1 / n for n in range(1, 6)]))
    assert len(twin["stages"]["bars"]) <= 60


def test_a_full_disk_costs_the_new_report_and_not_the_old_one(tmp_path: Path) -> None:
    """The system itself refuses to write: files may not grow beyond a few kilobytes for the moment."""
    path = folder(tmp_path / "run", steps=3)
    before = write_report(path).read_bytes()
    names = sorted(file.name for file in path.iterdir())
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(4)) + "\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_report(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (path / "report.html").read_bytes() == before
    assert sorted(file.name for file in path.iterdir()) == names, "nothing half written is left"


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.0, 0.2), (5.0, 5.0), (0.0, 0.0), (1e-9, 3e-9), (10, 12345.6)]
)
def test_ticks_are_few_round_and_cover(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high * (1 - 1e-9) and 2 <= len(found) <= 7
    assert np.allclose(np.diff(found), found[1] - found[0])


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.0, 3.0, 1234.5, 0.123456, 1e-7)] == [
        "unknown",
        "0",
        "3",
        "1,234",
        "0.1235",
        "1.00e-07",
    ]


@pytest.mark.parametrize(
    ("dark", "background"), [(True, (0x14, 0x17, 0x1A)), (False, (255, 255, 255))], ids=["dark", "light"]
)
def test_a_browser_draws_it_in_light_and_dark(tmp_path: Path, dark: bool, background: tuple[int, int, int]) -> None:
    draw = runpy.run_path(str(Path(__file__).parents[4] / "scripts" / "draw_report.py"))
    if draw["browser"]() is None:
        pytest.skip("no Chromium is installed; `make browser` gets Debian's")
    page = write_report(folder(tmp_path / "run"))
    html = draw["without_places"](page.read_text())
    assert "node1:7070" in page.read_text() and "node1:7070" not in html and 'id="curves"' in html
    page.write_text(html)
    picture = tmp_path / "page.png"
    draw["screenshot"](page, picture, 1200, 1600, dark=dark)
    import matplotlib.image

    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape == (1600, 1200, 3)
    assert tuple(pixels[5, 5]) == background
    # Curves and coloured tokens are there: hundreds of pixels far from grey.
    assert (pixels.max(-1) - pixels.min(-1) > 60).sum() > 500
