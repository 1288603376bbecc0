"""The command line's own promises."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import student.evaluate_model
from student.cli import evaluate


def test_the_folder_of_a_report_is_made_before_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, recipe = tmp_path / "new" / "report.json", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"run": "r", "model": {"path": str(tmp_path)}, "prompts": {"task": "addition"}}))

    def evaluated(recipe: Any, model: str, *, keep: bool) -> dict[str, Any]:
        assert out.parent.is_dir() and keep
        return {"accuracy": 1.0}

    monkeypatch.setattr(student.evaluate_model, "evaluate_model", evaluated)
    (tmp_path / "config.json").write_text("{}")
    evaluate(str(tmp_path), recipe, out=out)
    assert out.is_file()
