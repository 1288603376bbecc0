"""Whatever stands in a run folder, it is read: damage is left out and said, and no reader of runs fails by it."""

import io
import json
import os
import re
from pathlib import Path

import pytest

from opd.console import Console
from student.commands.episodes_cli import show
from student.report.compare import figures
from student.report.page.page import LIMIT_BYTES, write_report
from student.report.watch import View
from student.run.reading import read_mapping, read_records, read_steps


def test_cut_and_foreign_lines_are_counted(tmp_path: Path) -> None:
    problems: list[str] = []
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "kl": 0.5, "seconds": {"learn": 1.0, "odd": "x"}}\n\n[1]\n{"kl": 1}\n\xff\xfe\n{"step": 2, "k'
    )
    assert [record.get("step") for record in read_records(path, problems)] == [1, None]
    assert problems == ["metrics.jsonl: 3 damaged lines were left out."]
    assert read_steps(tmp_path, []) == [{"step": 1, "kl": 0.5, "seconds": {"learn": 1.0}}]


@pytest.mark.parametrize("text", ["{", "[1]", "5"])
def test_a_damaged_file_of_keys_is_empty_and_said(tmp_path: Path, text: str) -> None:
    problems: list[str] = []
    (tmp_path / "ending.json").write_text(text)
    assert read_mapping(tmp_path / "ending.json", problems) == {} and len(problems) == 1
    assert read_mapping(tmp_path / "none.json", problems, needed=False) == {} and len(problems) == 1
    read_mapping(tmp_path / "none.json", problems)
    assert problems[1:] == ["none.json is missing."]


def watched(run: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(View(run).frame())
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


STRANGE = {
    "recipe.yaml": "train: 5\nteachers: [a]\nmodel: x\nprompts: x\nmetrics_port: abc\nobjective: 3\n",
    "metrics.jsonl": '{"step": 1, "seconds": 3, "loss": "x"}\n{"step": 2, "reverse_kl": null, "response_tokens": ""}\n',
    "samples.jsonl": '{"pieces": 5, "prompt": 5}\n{"pieces": [[1, 2], [1, "a", "b"]], "prompt": [1], "tokens": "x"}\n',
    "summary.json": '{"before": 3, "after": {"accuracy": "x"}}',
    "provenance.json": '{"packages": [], "fleet": 1, "command": "x"}',
}
"""Well-formed files whose values are not what this version writes."""


@pytest.mark.parametrize("recipe", ["strange", "list", "cut", "binary"])
def test_report_watch_and_compare_read_a_folder_of_strange_files(tmp_path: Path, recipe: str) -> None:
    for name, text in STRANGE.items():
        (tmp_path / name).write_text(text)
    other = {"list": b"- a\n", "cut": b"model: {path: a", "binary": bytes(range(128, 256))}.get(recipe)
    if other is not None:
        (tmp_path / "recipe.yaml").write_bytes(other)
    shown = watched(tmp_path)
    assert "step 2/?" in shown and (recipe == "strange" or "recipe.yaml" in shown)
    page = write_report(tmp_path).read_text()
    assert "2 steps" in page and (recipe == "strange" or "recipe.yaml" in page)
    assert figures(tmp_path, []) == {}
    (tmp_path / "ending.json").write_text('{"how": 5, "fleet": {"replicas": 4, "counters": 3}}')
    assert "No state of the fleet is written" in write_report(tmp_path).read_text()


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TEXT = "\x1b]0;t\x07\x9b2J\u202ert\ud800\n2026-11-27 ERROR forged <script>[/x]"
HOSTILE: dict[str, str] = {
    "metrics.jsonl": "".join(
        json.dumps({"step": n, "reverse_kl": value, f"loss/{TEXT}": 1.0, "seconds": {"a": seconds, TEXT: 1.0}}) + "\n"
        for n, value, seconds in ((1, 10**400, -5), (2, 1e308, 1e308), (3, 1e300, 2.0), (4, -1e300, 1.0))
    )
    + '{"a":' * 100_000
    + "\n"
    + '{"step": 5, "a": '
    + "[" * 900
    + "]" * 900
    + "}\n",
    "samples.jsonl": json.dumps(
        {
            **dict.fromkeys(("label", "answer", "prompt", "verdict", "reason", "reference", "domain", "teacher"), TEXT),
            **{"step": 1, "kl": 0.1, "tokens": 1, "pieces": [[TEXT, 0.1, [[TEXT, 0.5]]]], "reward": 10**400},
            "episode": {
                **{"ended": TEXT, "opening": TEXT, "environment": {}},
                "segments": [{"who": "student", "start": 0, "end": 1, "text": TEXT, "kl": 0.1}],
            },
        }
    )
    + "\n"
    + '{"episode": {"ended": 3}}\n{"episode": 4}\n',
    "ending.json": json.dumps(
        {"how": "failed", "error": TEXT, "fleet": {"replicas": [{"teacher": TEXT}], "counters": {"x": 10**400}}}
    ),
    "summary.json": '{"seconds": [1], "response_tokens": "x", "after": {"accuracy": [1], "accuracy_half_width": {}}}',
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    for name, text in HOSTILE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "recipe.yaml").write_text("a: [" * 1000)
    return tmp_path


def test_the_run_of_a_stranger_costs_lines_of_problems_and_not_the_report(hostile: Path) -> None:
    page = write_report(hostile).read_text()
    assert "recipe.yaml cannot be read" in page and "metrics.jsonl: 2 damaged lines" in page
    assert "1 of 1 replicas lack a key" in page and "Content-Security-Policy" in page
    assert not CONTROLS.search(page) and "<script" not in page
    places = [match.start() for match in re.finditer(r"\\u202e", page)]
    within_text = [page.rfind("<bdi>", 0, place) > page.rfind("</bdi>", 0, place) for place in places]
    in_tags = [page.rfind("<", 0, place) > page.rfind(">", 0, place) for place in places]
    in_pictures = [page.rfind("<svg", 0, place) > page.rfind("</svg>", 0, place) for place in places]
    assert places and all(map(any, zip(within_text, in_tags, in_pictures, strict=True)))


def test_watch_and_compare_show_what_a_stranger_wrote_without_obeying_it(hostile: Path) -> None:
    shown = watched(hostile)
    assert "step 4/?" in shown and not CONTROLS.search(shown)
    problems: list[str] = []
    assert figures(hostile, problems)["seconds/a"] == 1.5 and len(problems) == 1


def test_episodes_are_shown_without_obeying_them(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(hostile, None, None, 3)
    shown = capsys.readouterr().out
    assert "turn 1, 1 tokens" in shown and not CONTROLS.search(shown)


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "samples.jsonl", "ending.json", "summary.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    for one, text in STRANGE.items():
        (tmp_path / one).write_text(text)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    assert f"{name} cannot be read: it is not a plain file" in write_report(tmp_path).read_text()


def test_a_page_of_many_and_long_names_stays_small_and_counts_them(tmp_path: Path) -> None:
    names = [f"loss/{'m' * 40}{n}" for n in range(3000)] + ["n" * 3_000_000]
    record = {**dict.fromkeys(names, 1.0), "step": 1, "seconds": {f"stage {n}": 1.0 for n in range(3000)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    page = write_report(tmp_path).read_text()
    assert len(page.encode()) < LIMIT_BYTES and "500 of 3,001 metrics are shown" in page
    assert "of 3,000 stages are shown" in page
