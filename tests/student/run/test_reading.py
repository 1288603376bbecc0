"""Whatever stands in a run folder, it is read: damage is left out and said, and no reader of runs fails by it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from student.run.compare import figures
from student.run.reading import read_mapping, read_records, read_steps
from student.run.report.page import write_report
from student.run.watch import View


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
    console = Console(file=io.StringIO(), width=80)
    console.print(View(tmp_path).frame())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 2/?" in shown and (recipe == "strange" or "recipe.yaml" in shown)
    page = write_report(tmp_path).read_text()
    assert "2 steps" in page and (recipe == "strange" or "recipe.yaml" in page)
    assert figures(tmp_path, []) == {}
    (tmp_path / "ending.json").write_text('{"how": 5, "fleet": {"replicas": 4, "counters": 3}}')
    assert "No state of the fleet is written" in write_report(tmp_path).read_text()
