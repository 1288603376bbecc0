"""The plug-ins of docs/plugins.md run as they stand there."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from opd.config import parse_settings
from student.loop import train
from student.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"```\w+ {name}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found.group(1)


def test_the_strategy_and_the_method_of_the_page_run_and_act(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("my_plugins")
    monkeypatch.setitem(sys.modules, "my_plugins", module)
    for name in ("strategy", "method"):
        exec(compile(block(name), f"docs/plugins.md {name}", "exec"), module.__dict__)
    wanted = yaml.safe_load(block("recipe"))
    data = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "prompts": {"task": "student_plugins:Halves", "options": {"digits": 2}},
        "eval": {"prompts": 0},
        **wanted,
        "rollout": {**wanted["rollout"], "max_new_tokens": 12, "max_prompt_tokens": 32},
        "train": {**wanted["train"], "steps": 3, "learning_rate": 1e-3, "threads": 1},
    }
    recipe = parse_settings(Recipe, data)
    train(recipe)
    lines = [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]
    # Prompts with an odd sum earn nothing whatever is answered: they were tried again.
    assert any(line["rollout_rounds"] == 2 and line["sampled_rows"] > 16 for line in lines)
    assert all(0 < line["repeat/mixed_share"] < 1 for line in lines if line["rollout_rounds"] == 2)
    assert lines[0]["updates_divisor"] == 1 and lines[-1]["updates_divisor"] > 1
    assert lines[0]["updates"] == 4 and lines[-1]["updates"] < 4
    saved = json.loads((Path(recipe.run) / "checkpoints/step-000003/trainer/loop.json").read_text())
    assert saved["controllers"]["0"]["divisor"] >= 2
