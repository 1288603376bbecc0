"""What the steps of a run wrote down."""

import json
from pathlib import Path
from typing import Any

from student.commands.reproduce import is_timed
from student.settings.recipe import Recipe


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run folder."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def records(recipe: Recipe) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on time."""
    return [{name: value for name, value in line.items() if not is_timed(name)} for line in metrics_of(recipe.run)]
