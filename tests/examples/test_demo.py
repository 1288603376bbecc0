"""What the demo shows at its end."""

import json
import runpy
from pathlib import Path

from rich.console import Console

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_ends_with_three_answers_before_and_after(tmp_path: Path) -> None:
    def line(label: str, number: int) -> str:
        answer, verdict = (f"{label}-{number}", "correct" if label == "after" else "wrong")
        kept = {"label": label, "prompt": f"{number}+1=", "answer": answer, "verdict": verdict, "reference": number + 1}
        return json.dumps(kept) + "\n"

    (tmp_path / "student").mkdir()
    lines = [line(label, number) for label in ("before", "train", "after") for number in range(5)]
    (tmp_path / "student" / "samples.jsonl").write_text("".join(lines))
    shown = runpy.run_path(str(DEMO))["answers"](tmp_path)
    console = Console(width=120, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(shown)
    text = console.export_text()
    for number in range(3):
        assert f"before-{number}" in text and f"after-{number}" in text
    assert "before-3" not in text and "train-0" not in text and shown.row_count == 3
