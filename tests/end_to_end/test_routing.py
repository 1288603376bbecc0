"""Teachers by prompt and several teachers on one row, over a real server that holds two models."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opd import TeacherFleet
from opd.errors import ConfigError
from opd.tasks.build import build_prompts
from opd.wire.types import PayloadKind, PayloadSpec
from student.loop import train
from student.needs import TEACHER, Needs, SignalNeed
from student.recipe import Recipe
from student.row import Row, RowKey
from student.score import Scorer

MIX = {
    "mix": [
        {"task": "addition", "options": {"digits": 2}, "domain": "sums"},
        {"task": "subtraction", "options": {"digits": 2}, "domain": "differences"},
    ]
}


def row_of(prompt: Any) -> Row:
    ids = np.arange(4, 12, dtype=np.uint32)
    candidates = np.arange(20, 24, dtype=np.uint32)[None].repeat(5, 0)
    return Row(
        key=RowKey(0, prompt.uid, 0),
        prompt=prompt,
        prompt_ids=ids[:3],
        response_ids=ids[3:],
        behaviour_logp=np.zeros(5, np.float32),
        policy_version=np.zeros(5, np.int32),
        loss_mask=np.ones(5, np.bool_),
        truncated=False,
        text="",
        candidates=candidates,
    )


def test_each_domain_is_scored_by_its_own_teacher(teacher: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        prompts=MIX, teachers={"default": None, "routes": {"sums": "teacher", "differences": "student"}}
    )
    source = build_prompts(recipe.prompts, seed=0)
    needs = Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))
    assert recipe.teachers is not None
    with TeacherFleet.connect(teacher.address) as fleet:
        scorer = Scorer(fleet, recipe.teachers, needs, source, torch.device("cpu"))
        rows = [row_of(prompt) for prompt in source.prompts("train", 6)]
        for row in rows:
            scorer.submit(row)
        scorer.collect(rows)
        assert {(r.prompt.domain, r.teacher) for r in rows} == {("sums", "teacher"), ("differences", "student")}
        for row in rows:
            direct = fleet.score(row.teacher, [row.score_item(gather=False)], PayloadSpec.sampled())[0]
            np.testing.assert_array_equal(row.signals[TEACHER, PayloadKind.SAMPLED].sampled, direct.sampled)


def test_weighted_teachers_are_mixed_in_probability_space(teacher: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(teachers={"default": {"teacher": 3.0, "student": 1.0}})
    source = build_prompts(recipe.prompts, seed=0)
    spec = PayloadSpec.gather(4, "f32")
    assert recipe.teachers is not None
    with TeacherFleet.connect(teacher.address) as fleet:
        scorer = Scorer(fleet, recipe.teachers, Needs((SignalNeed(TEACHER, spec),), 4), source, torch.device("cpu"))
        row = row_of(source.prompts("train", 1)[0])
        scorer.submit(row)
        scorer.collect([row])
        parts = [fleet.score(name, [row.score_item(gather=True)], spec)[0] for name in ("teacher", "student")]
    mixed = row.signals[TEACHER, PayloadKind.GATHER]
    for field in ("sampled", "values", "log_tail"):
        one, two = (np.exp(getattr(part, field).astype(np.float64)) for part in parts)
        np.testing.assert_allclose(getattr(mixed, field), np.log(0.75 * one + 0.25 * two), atol=1e-5)


def test_a_run_with_two_domain_teachers_trains(make_recipe: Callable[..., Recipe]) -> None:
    routes = {"sums": "teacher", "differences": {"teacher": 0.5, "student": 0.5}}
    recipe = make_recipe(
        prompts=MIX,
        teachers={"default": None, "routes": routes},
        train={"steps": 2},
        eval={"prompts": 8, "every": 1},
    )
    summary = train(recipe)
    assert summary["steps"] == 2
    first, _ = map(json.loads, (recipe.run / "metrics.jsonl").read_text().splitlines())
    found = summary["before"]["by_domain"]
    assert set(found) == {"sums", "differences"} and sum(count for _, count in found.values()) == 8
    assert sum(accuracy * count for accuracy, count in found.values()) / 8 == pytest.approx(
        summary["before"]["accuracy"]
    )
    assert {"domain_accuracy/sums", "domain_accuracy/differences"} <= set(first)
    assert set(json.loads((recipe.run / "provenance.json").read_text())["fleet"]) == {"teacher", "student"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": MIX, "teachers": {"default": None, "routes": {"sums": "teacher"}}}, "differences"),
        (
            {
                "teachers": {"default": {"teacher": 1, "student": 1}},
                "objective": [{"name": "opd", "payload": "hidden"}],
            },
            "gather",
        ),
    ],
)
def test_an_unmapped_prompt_or_an_impossible_mixture_stops_the_run_before_its_first_step(
    make_recipe: Callable[..., Recipe], changes: dict[str, Any], words: str
) -> None:
    recipe = make_recipe(**changes)
    with pytest.raises(ConfigError, match=words):
        train(recipe)
    assert not recipe.run.exists()
