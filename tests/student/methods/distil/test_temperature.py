"""Served models have the temperature of the rollouts unless a recipe names another, which is said."""

from collections.abc import Callable
from typing import Any

import pytest

from opd.config import parse_settings
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe

LEARNERS = [
    {"name": "reference_kl", "payload": "sampled"},
    {"name": "reference_kl", "payload": "gather", "k": 8},
    {"name": "reference_kl", "payload": "hidden"},
    {"name": "opd", "payload": "sampled"},
    {"name": "opd", "payload": "gather", "k": 8},
    {"name": "opd", "payload": "topk", "k": 8, "divergence": "forward_kl"},
    {"name": "opd", "payload": "hidden"},
    {"name": "gopd", "payload": "gather", "k": 8},
    {"name": "gopd", "payload": "hidden"},
    {"name": "vopd", "k": 8},
    {"name": "poweropd"},
    {"name": "tropd", "k": 8},
]


@pytest.mark.parametrize("entry", LEARNERS, ids=lambda entry: f"{entry['name']}-{entry.get('payload', '')}")
def test_a_student_pays_nothing_against_itself_at_any_rollout_temperature(
    bench: Callable[..., Any], entry: dict[str, Any]
) -> None:
    made = bench(entry, teacher="student", temperature=0.7)
    # Values of the wire are of 16 bits.
    assert largest(made.gradient(made.rows())) < 5e-4


@pytest.mark.parametrize("payload", ["sampled", "gather", "hidden"])
def test_another_temperature_of_the_teacher_pulls_on_a_student_that_equals_it(
    bench: Callable[..., Any], payload: str
) -> None:
    entry = {"name": "opd", "payload": payload, "k": 8, "teacher_temperature": 1.0}
    made = bench(entry, teacher="student", temperature=0.7)
    assert largest(made.gradient(made.rows())) > 5e-3


def largest(gradient: dict[str, Any]) -> float:
    return max(float(g.abs().max()) for g in gradient.values())


def remarks(**term: Any) -> list[str]:
    recipe = {
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "teachers": {"endpoints": ["localhost:1"]},
        "rollout": {"temperature": 0.7},
        "objective": [{"name": "opd", **term}],
        "run": "unused",
    }
    return build_plugins(parse_settings(Recipe, recipe)).remarks


@pytest.mark.parametrize("payload", ["sampled", "gather", "hidden"])
def test_a_temperature_other_than_the_rollouts_is_said(payload: str) -> None:
    (remark,) = remarks(payload=payload, teacher_temperature=1.0)
    assert "student at temperature 0.7" in remark and "teacher at temperature 1" in remark
    assert remarks(payload=payload) == remarks(payload=payload, teacher_temperature=0.7) == []
