"""The environment that docs/environments.md writes is one, and a table of prompts can name it."""

import json
import os
import re
from pathlib import Path

import pytest

from opd.tasks.build import build_prompts
from opd.tasks.environments import Observation
from opd.tasks.environments.pool import EnvironmentPool
from opd.tasks.settings import FileSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()


def test_the_environment_of_the_page_plays_what_a_table_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (line,) = re.findall(r"^    (\{\"prompt\".*mine:Guess.*\})$", PAGE, flags=re.M)
    (tmp_path / "mine.py").write_text(code)
    table = tmp_path / "prompts.jsonl"
    table.write_text("".join(json.dumps(json.loads(line) | {"prompt": f"Game {i}."}) + "\n" for i in range(20)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    (prompt,) = build_prompts(FileSettings(file=table), seed=0).prompts("train", 1)
    with EnvironmentPool(prompt.extra["environment"]) as pool:
        assert pool.reset({0: (prompt, 28)})[0] == Observation("Guess.")
        assert pool.step({0: "3"})[0] == Observation("higher", reward=0.0)
        assert pool.step({0: "7"})[0] == Observation("", reward=1.0, done=True, success=True)
