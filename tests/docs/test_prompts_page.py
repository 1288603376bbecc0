"""What docs/prompts.md shows works."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from opd.config import parse_settings
from opd.tasks import Prompt, build_prompts
from student.settings.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "prompts.md").read_text()
VERIFIER, FROM_PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
REST = {"run": "x", "model": {"path": "x"}}


def test_the_verifier_of_the_page_judges_answers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("parity")
    exec(VERIFIER, module.__dict__)
    monkeypatch.setitem(sys.modules, "parity", module)
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(40)))
    prompts = {"file": str(file), "verifier": "parity:ParityVerifier"}
    source = build_prompts(parse_settings(Recipe, {**REST, "prompts": prompts}).prompts, seed=0)
    prompt = source.prompts("train", 1)[0]
    right = str(prompt.answer)
    assert source.verify(prompt, right).value == 1 and source.verify(prompt, str(int(right) + 1)).value == 0
    assert not source.verify(Prompt.make("?"), "1").known


def test_training_from_python_runs_as_the_page_says(
    world: Path, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "run": "unused",
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [teacher.address], "default": "teacher"},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 8, "max_prompt_tokens": 32},
        "train": {"threads": 1},
        "eval": {"prompts": 4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    assert "train.steps=200" in FROM_PYTHON
    exec(compile(FROM_PYTHON.replace("steps=200", "steps=1"), "prompts.md", "exec"), {"__name__": "__main__"})
    assert "runs/mine/checkpoints/step-000001 {'accuracy': " in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "samples.jsonl").is_file()
