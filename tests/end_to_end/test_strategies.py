"""Rollout strategies through the whole loop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import records
from safetensors.torch import load_file

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from student.job.session import train
from student.job.stop_check import StopCheck
from student.settings.recipe import Recipe

DYNAMIC = {
    "prompts": {"task": "student_plugins:Halves", "options": {"digits": 2}},
    "rollout": {
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "strategy": {"name": "dynamic_sampling", "rounds": 8, "draw": "missing"},
    },
    "objective": [{"name": "grpo"}],
    "eval": {"prompts": 0},
}
TRAIN = {"steps": 4, "checkpoint_every": 0}


def test_dynamic_sampling_trains_on_full_batches_and_counts_what_it_drew(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(**DYNAMIC, train=TRAIN)
    train(recipe)
    lines = records(recipe)
    assert any(line["rollout_rounds"] > 1 for line in lines)
    for line in lines:
        assert line["dynamic_sampling/filled"] == 1.0 and line["dynamic_sampling/kept_share"] <= 1.0
        drawn = line["sampled_rows"]
        assert drawn >= 12 and (drawn == 12) == (line["rollout_rounds"] == 1)
        assert line["student_entropy"] > 0  # of the student, in runs without a teacher too
        assert line["response_tokens"] == line["cost/train/sampled_tokens"]
        # All that was drawn is paid for, also what is not learnt from.
        trained = line["cost/train/gradient_positions"]
        assert line["cost/train/decoded_positions"] >= trained * drawn / 12 * 0.8
    last = json.loads((recipe.run / "checkpoints/step-000004/trainer/loop.json").read_text())
    assert last["prompts"] == sum(line["sampled_rows"] for line in lines) / 4


def test_teachers_are_asked_about_chosen_groups_alone(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []  # by group
    submit = TeacherFleet.submit_many

    def counted(self: TeacherFleet, teacher: str, items: Any, *arguments: Any, **options: Any) -> Any:
        asked.extend(options["groups"] or ())  # without groups: an evaluation
        return submit(self, teacher, items, *arguments, **options)

    monkeypatch.setattr(StopCheck, "lines", lambda self, poll: [])  # which asks before the first step
    monkeypatch.setattr(TeacherFleet, "submit_many", counted)
    both = {"objective": [{"name": "grpo"}, {"name": "opd", "k": 8, "weight": 0.1}]}
    recipe = make_recipe(**{**DYNAMIC, **both}, train=TRAIN)
    train(recipe)
    lines = records(recipe)
    rows = sum(line["sampled_rows"] for line in lines)
    assert len(asked) == 12 * len(lines) < rows
    for line in lines:  # each position that is learnt from was scored once
        assert line["cost/train/teacher_positions"] == line["cost/train/gradient_positions"]
        assert line["cost/train/teacher_positions"] <= line["cost/train/decoded_positions"]


def test_an_interrupted_run_with_a_strategy_resumes_to_the_same_bits(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    interrupted: Callable[..., dict[str, Any]],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    calm, cut = (make_recipe(run=str(tmp_path / run), **DYNAMIC, train=TRAIN) for run in ("calm", "cut"))
    straight, resumed = train(calm), interrupted(cut, update=3)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(straight["checkpoint"]))
    assert records(cut) == records(calm)


def test_a_group_of_one_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    alone = {"rollout": {**DYNAMIC["rollout"], "samples_per_prompt": 1}, "objective": [{"name": "opd", "k": 8}]}
    recipe = make_recipe(**{**DYNAMIC, **alone})
    with pytest.raises(ConfigError, match="dynamic_sampling compares the answers"):
        train(recipe)


@pytest.mark.slow
def test_two_ranks_draw_and_learn_like_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    one = make_recipe(run=str(tmp_path / "one"), **DYNAMIC, train=TRAIN)
    two = make_recipe(run=str(tmp_path / "two"), **DYNAMIC, train=TRAIN)
    train(one)
    two_ranks(two)
    for mine, theirs in zip(records(one), records(two), strict=True):
        for name in ("rollout_rounds", "sampled_rows", "dynamic_sampling/kept_share", "response_tokens"):
            assert theirs[name] == mine[name], name
        for name in ("reward", "grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3), name
    last = "checkpoints/step-000004/model/model.safetensors"
    found, expected = load_file(two.run / last), load_file(one.run / last)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-3)
