"""The world of episodes: models learn paths, are measured by playing, and its premise tells the teachers apart."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.errors import ConfigError
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd_lab.evaluate import grade_model, grades, read_models
from opd_lab.experiments import load_experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.takeover_premise import divergence_by_turn, measure, winnable
from opd_lab.tiny.build import build_world
from opd_lab.tiny.files import read_world
from opd_lab.tiny.presets import world_key
from opd_lab.tiny.summary import WorldSummary
from opd_lab.tiny.training import Examiner
from opd_lab.world import WorldModels
from student.data.plan import EpisodePlan, plan_step

SMALL = """
max_new_tokens: 38
measured: 16
episodes: {turns: 10, turn_tokens: 2, isolation: none}
tasks:
  lock: {task: lock, options: {digits: 5, turns: 10, symbols: 3, show: both}}
  slips: {task: lock, options: {digits: 5, turns: 10, symbols: 3, show: both, slips: 0.4}}
models:
  base: {shape: {hidden: 64, layers: 1, heads: 2}, stages: [{tasks: [lock], sft: {steps: 16, batch: 16, warmup: 5}}]}
  blind: {shape: {hidden: 64, layers: 1, heads: 2}, stages: [{tasks: [lock], sft: {steps: 110, batch: 16, warmup: 5}}]}
  wise: {shape: {hidden: 64, layers: 1, heads: 2}, stages: [{tasks: [slips], sft: {steps: 150, batch: 16, warmup: 5}}]}
"""


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> WorldSummary:
    """A lock of three symbols, which a teacher learns in a second or two."""
    file = tmp_path_factory.mktemp("locks") / "lock.yaml"
    file.write_text(SMALL)
    return build_world(file.with_suffix(""), file, seed=1)


@pytest.fixture
def plan(locks: WorldSummary, tmp_path: Path) -> ExperimentPlan:
    experiment = load_experiment("lock")
    options = locks.tasks["lock"]["options"]
    assert options["show"] == "both"
    recipe = {**experiment.recipe, "eval": {**experiment.recipe["eval"], "prompts": 24}}
    recipe["rollout"] = {
        **recipe["rollout"],
        "max_new_tokens": 38,
        "episodes": {"turns": 10, "turn_tokens": 2, "isolation": "none"},
    }
    small = replace(experiment, world=str(locks.folder.with_suffix(".yaml")), recipe=recipe)
    return ExperimentPlan(small, "full", tmp_path, {1: WorldModels(locks, "full")})


@pytest.mark.slow
def test_models_learn_the_paths_of_an_environment_and_are_measured_by_episodes(locks: WorldSummary) -> None:
    greedy = {name: model.greedy["lock"] for name, model in locks.models.items()}
    assert greedy["base"] < 0.5 and greedy["blind"] > 0.8 and greedy["wise"] > 0.8, greedy


@pytest.mark.slow
def test_only_the_teacher_that_saw_mistakes_knows_the_way_back(plan: ExperimentPlan) -> None:
    blind = measure(plan, 1, teacher="blind", lost=0.5)
    wise = measure(plan, 1, teacher="wise", kept=0.6)
    assert blind.present and wise.present, (blind, wise)
    assert not measure(plan, 1, teacher="wise", lost=0.5).present
    assert "blind wins" in blind.numbers and "on own states" in blind.numbers
    assert re.search(r"after 4 turns \(0\.00 \[0\.00, 0\.\d\d\] of \d+ in letter states\)", blind.numbers)


@pytest.mark.slow
def test_episodes_are_graded_without_the_dear_pass_at_64(plan: ExperimentPlan) -> None:
    plan = replace(plan, experiment=replace(plan.experiment, worlds=(1,)))
    grade, *_ = grades(plan, 1)
    grade_model(grade)
    level = read_models(plan)["base"][grade.replicate]
    assert 0 <= level.accuracy <= level.pass8 <= 1 and math.isnan(level.pass64)


@pytest.mark.slow
def test_divergence_by_turn_is_that_of_the_turns_own_tokens(locks: WorldSummary) -> None:
    plans = read_world(locks.folder.with_suffix(".yaml"))
    (prompt,) = build_prompts(plans.tasks["lock"], seed=1).prompts("heldout", 1)
    path = tuple(prompt.extra["path"])
    (planned,) = plan_step(0, [prompt], samples=1, max_new_tokens=1, temperature=1.0).rows
    student, teacher = (
        Examiner(locks.models[name].path, longest=38, seed=1, episodes=plans.episodes) for name in ("base", "blind")
    )
    (row,) = student.play([replace(planned, episode=EpisodePlan(replay=path, given=True))])
    found = divergence_by_turn(student, teacher, [row])
    tokenizer = student.tokenizer
    text, register, by_hand = f"{prompt.text}{prompt.extra['register']}{prompt.extra['program'][0]}", "", []
    ids = tokenizer(text)["input_ids"]
    for place, digit in enumerate(path):
        total = 0.0
        for token in (tokenizer(digit)["input_ids"][0], tokenizer.eos_token_id):
            with torch.no_grad():
                p, q = (
                    one.student.lm(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1)
                    for one in (student, teacher)
                )
            total += float((p * (p / q).log()).sum())
            ids = [*ids, token]
        by_hand.append(total)
        register = digit + prompt.extra["program"][place + 1 : place + 2]
        ids = [*ids, *tokenizer(register)["input_ids"]]
    assert found == pytest.approx(by_hand, rel=1e-4) and not np.isnan(found).any()
    assert all(math.isfinite(value) and value >= 0 for value in found)
    student.close()
    teacher.close()


@pytest.mark.slow
def test_an_episode_can_be_won_while_turns_are_left_for_its_digits_and_the_way_back(plan: ExperimentPlan) -> None:
    prompt: Prompt = build_prompts(read_world(plan.experiment.world).tasks["lock"], seed=1).prompts("heldout", 1)[0]
    first, *others = prompt.extra["path"]
    wrong = str((int(first) + 1) % 3)
    assert winnable(prompt, []) and winnable(prompt, [first]) and winnable(prompt, [wrong, "b"])
    # Ten turns, five digits: with the way back six turns are needed.
    assert winnable(prompt, [wrong, "x", "x", "x"]) and not winnable(prompt, [wrong, "x", "x", "x", "x"])
    assert not winnable(prompt, [first, *others])  # won already


def test_the_way_episodes_are_played_is_part_of_a_worlds_key(tmp_path: Path) -> None:
    (tmp_path / "lock.yaml").write_text(SMALL)
    played = read_world(tmp_path / "lock.yaml")
    assert played.episodes is not None
    plain = replace(played, episodes=None)
    other = replace(played, episodes=played.episodes.model_copy(update={"turns": 9}))
    assert len({world_key(plan, 1) for plan in (played, plain, other)}) == 3


def test_a_wrong_key_of_episodes_is_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(SMALL.replace("turn_tokens", "turns_tokens"))
    with pytest.raises(ConfigError, match="turns_tokens"):
        read_world(tmp_path / "wrong.yaml")
