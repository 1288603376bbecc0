"""The world of docs/tiny.md is built as the page says, with fewer steps."""

import os
import re
import sys
from pathlib import Path

import forked

from opd_lab.tiny.summary import read_summary

PAGE = (Path(__file__).parents[2] / "docs" / "tiny.md").read_text()
STEPS = {"steps: 600, until: 0.3": "steps: 2, batch: 4", "steps: 200": "steps: 1, prompts: 2, samples: 2"}


def block(kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_documented_task_has_40_lines_and_its_world_is_built(tmp_path: Path) -> None:
    code, world = block("python"), block("yaml")
    assert len(code.splitlines()) <= 40
    for full, short in STEPS.items():
        assert full in world
        world = world.replace(full, short)
    (tmp_path / "vowels.py").write_text(code)
    (tmp_path / "vowels.yaml").write_text(world + "measured: 8\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "opd.cli", "tiny", "build", "vowels.yaml"]
    done = forked.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = read_summary(tmp_path / "vowels")
    assert found is not None and found.complete and set(found.models) == {"base", "teacher"}
    assert found.preset == "vowels"
