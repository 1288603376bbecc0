"""What a run says of the plug-ins that its recipe names, before it begins."""

from typing import Any

import pytest

from student.job.plugins import build_plugins
from student.settings.recipe import Recipe


def remarks(**settings: Any) -> str:
    recipe = {
        "run": "run",
        "model": {"path": "m"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4},
    }
    return " ".join(build_plugins(Recipe(**recipe | {"teachers": {"endpoints": ["host:1"]}} | settings)).remarks)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"objective": [{"name": "dispo"}]}, "dispo is built from the abstract"),
        (
            {"objective": [{"name": "policy_gradient", "advantage": {"name": "r2_opd"}}]},
            "r2_opd is built from the abstract",
        ),
        ({"objective": [{"name": "stable_reinforce"}]}, ""),
    ],
)
def test_a_formula_that_no_text_gives_is_said_once_when_a_run_starts(settings: dict[str, Any], named: str) -> None:
    assert remarks(**settings).count("the formula of") == bool(named)
    assert named in remarks(**settings)
