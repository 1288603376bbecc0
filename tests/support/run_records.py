"""What the steps of a run wrote down."""

import json
from typing import Any

from student.recipe import Recipe
from student.run.reproduce import is_timed


def records(recipe: Recipe) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on time."""
    lines = [json.loads(line) for line in (recipe.run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_timed(name)} for line in lines]
