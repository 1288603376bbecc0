"""What a run shows at its end: the same prompts before and after."""

import json
from pathlib import Path
from typing import Any

from opd.console import Console
from student.report.answers import compared


def line(label: str, number: int, **changes: Any) -> str:
    verdict = "correct" if label == "after" else "wrong"
    sample = {"label": label, "prompt": f"{number}+1=", "answer": f"{label}-{number}", "verdict": verdict}
    return json.dumps(sample | {"reference": str(number + 1)} | changes) + "\n"


def shown(run: Path, **options: Any) -> str:
    console = Console(width=120, record=True, file=(run / "out").open("w"))
    console.print(compared(run, **options))
    return console.export_text()


def test_a_run_ends_with_three_answers_before_and_after(tmp_path: Path) -> None:
    lines = [line(label, number) for label in ("before", "train", "after") for number in range(5)]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    text = shown(tmp_path)
    for number in range(3):
        assert f"before-{number} (wrong)" in text and f"after-{number} (correct)" in text
    assert "before-3" not in text and "train-0" not in text and "teacher" not in text


def test_the_last_message_of_a_chat_and_the_teachers_answers_are_shown_on_one_line_each(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which [b]city[/b]?\x1b[2J"}]
    lines = [line(label, 0, prompt=chat, answer="Os\nlo " + "x" * 999) for label in ("before", "after")]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    text = shown(tmp_path, teacher=[{"answer": "Oslo."}])
    assert "[b]city[/b]" in text and "\x1b" not in text and "Be brief" not in text and "Oslo." in text and "…" in text


def test_a_run_without_evaluations_has_nothing_to_compare(tmp_path: Path) -> None:
    assert compared(tmp_path) is None
    (tmp_path / "samples.jsonl").write_text(line("before", 0))
    assert compared(tmp_path) is None
