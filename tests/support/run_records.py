"""What the steps of a run wrote down."""

import json
from pathlib import Path
from typing import Any

from student.commands.reproduce import is_timed
from student.settings.recipe import Recipe


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The steps in metrics.jsonl of a run folder, without the evaluation before them."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"]]


def records(recipe: Recipe) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on time."""
    return [{name: value for name, value in line.items() if not is_timed(name)} for line in metrics_of(recipe.run)]
