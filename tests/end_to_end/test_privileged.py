"""Recipes whose teacher sees more than the student, run on the tiny world."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import metrics_of

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
CASES = {
    "qwen3-1.7b-opsd": {"solution"},
    "qwen3-4b-sdft": {"demonstration"},
    "qwen3-8b-sdpo": set(),
    "qwen3-8b-rlsd": {"solution"},
    "qwen3-1.7b-self-distillation": {"solution"},
    "qwen3-4b-teacher-system-prompt": set(),
    "qwen3-1.7b-base-from-instruct": set(),
}
"""Recipes, and the columns that their teachers read."""


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_with_a_teacher_that_sees_more_learns_from_what_it_sees(
    name: str, recipe_data: dict[str, Any], teacher: Any, tmp_path: Path
) -> None:
    given = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    teachers = dict(given["teachers"])
    if "endpoints" in teachers:
        teachers |= {"endpoints": [teacher.address], "default": "teacher", "map_stops": False}
    told = {"solution": "s" * 8, "demonstration": "d" * 8}
    lines = [{"prompt": f"{i}+{i}=", "answer": str(i + i), **told} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = {key: value for key, value in given["prompts"].items() if key in ("chat", "keep_columns")}
    assert set(prompts.get("keep_columns", ())) == CASES[name]
    prompts |= {"file": str(tmp_path / "prompts.jsonl"), "verifier": "student_plugins:Even"}
    samples = given["rollout"].get("samples_per_prompt", 1)
    changes = {
        "prompts": prompts,
        "teachers": teachers,
        "contexts": given["contexts"],
        "objective": given["objective"],
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": samples,
            "max_new_tokens": 10,
            "max_prompt_tokens": 32,
        },
        "train": {"steps": 2, "learning_rate": 1e-3, "threads": 1},
        "eval": {"prompts": 0},
    }
    for context in changes["contexts"].values():
        context["max_tokens"] = 480
    recipe = parse_settings(Recipe, recipe_data | changes)
    train(recipe)
    first, second = metrics_of(recipe.run)
    assert first["hinted_share"] == pytest.approx(1 - first["context_missing_share"]) and first["hinted_share"] > 0
    assert 0 <= first["hint_quoted"] < 1
    assert first["grad_norm"] > 0 and second["grad_norm"] > 0
    if name.endswith("rlsd"):
        assert 0 < first["rlsd_moved"] <= 0.1 and first["hint_gap"] != 0  # l is 0.5, the band 0.2
    else:
        # Without its context the initial, averaged or present student would agree with itself in the first step.
        assert first["loss/opd"] > 1e-3
