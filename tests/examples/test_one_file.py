"""examples/one_file.py distils from a real teacher, and changes the model."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "examples" / "one_file.py"


def test_the_whole_of_distillation_fits_in_one_file(
    world: Path, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(world / "student"), teacher.address, "--steps", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["one_file.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    shown = re.findall(r"step (\d+): reverse KL (-?[\d.]+) nats a token, (\d+) of 96 right", capsys.readouterr().out)
    assert [int(step) for step, *_ in shown] == [1, 2] and all(abs(float(loss)) < 20 for _, loss, _ in shown)
    before, after = (load_file(folder / "model.safetensors") for folder in (world / "student", tmp_path / "out"))
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
