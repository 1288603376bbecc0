"""Stages of worlds as student jobs: they learn, repeat, put errors in, and end at their level."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import make_row
from run_records import metrics_of
from safetensors.torch import load_file

from opd.tasks import TaskSettings, build_prompts
from opd_lab.tiny.methods import Noise, NoiseSettings
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import ReinforcePlan, SftPlan, Shape
from opd_lab.tiny.tokenizer import make_tokenizer
from opd_lab.tiny.training import Examiner, recipe_of, train_stage
from student.data.row import RowKey
from student.job.session import train

SUMS = TaskSettings(task="addition", options={"digits": 1})


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of random weights."""
    folder = tmp_path_factory.mktemp("begin")
    tokenizer = make_tokenizer()
    make_model(Shape(hidden=32, layers=1, heads=2), 0, pad=0, end=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_supervised_training_lowers_the_loss_on_answers_with_errors(begin: Path, tmp_path: Path) -> None:
    plan = SftPlan(steps=30, batch=16, noise=0.4, warmup=2)
    train(recipe_of(plan, [SUMS], model=begin, run=tmp_path / "run", seed=0, longest=12))
    found = metrics_of(tmp_path / "run")
    assert found[-1]["sft_nats"] < 0.7 * found[0]["sft_nats"]
    shares = [line["noise_share"] for line in found]
    # Of half of the rows two fifths; a tenth of the digits drawn stand in their own place.
    assert 0.12 < sum(shares) / len(shares) < 0.24


def test_errors_in_answers_differ_from_prompt_to_prompt_under_their_one_seed() -> None:
    noise = Noise(NoiseSettings(name="noise", rows=1.0, share=0.5))
    noise.start(SimpleNamespace(tokenizer=lambda text, **_: {"input_ids": list(range(10, 20))}))  # type: ignore[arg-type]
    rows = [make_row(40, key=RowKey(0, uid, 0), origin="expert") for uid in ("a", "a", "b")]
    one, same, other = (row.response_ids.tolist() for row in noise.compose(rows))
    assert one == same != other


def test_a_stage_gives_the_same_weights_every_time_and_others_for_another_start(begin: Path, tmp_path: Path) -> None:
    def weights(run: str, **more: Any) -> dict[str, torch.Tensor]:
        plan, steps = SftPlan(steps=3, batch=8, **more), []
        recipe = recipe_of(plan, [SUMS], model=begin, run=tmp_path / run, seed=0, longest=12)
        folder = train_stage(recipe, lambda done, total: steps.append((done, total)))
        assert steps[0] == (1, 3) and steps[-1] == (3, 3)
        return load_file(folder / "model.safetensors")

    one, same, other = weights("one"), weights("same"), weights("other", start=7)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_ends_at_its_level_and_says_that_it_is_done(begin: Path, tmp_path: Path) -> None:
    recipe = recipe_of(SftPlan(steps=9, batch=8), [SUMS], model=begin, run=tmp_path / "run", seed=0, longest=8)
    until = {"name": "opd_lab.tiny.methods:Until", "accuracy": 1e-9, "every": 2, "prompts": 4}
    # An untrained model is never right, so the level waits; with a verifier that is always content it does not.
    never = recipe.model_copy(update={"methods": [*recipe.methods, until], "run": tmp_path / "never"})
    assert train(never)["steps"] == 9
    assert [line.get("until_accuracy") for line in metrics_of(never.run)] == [None, 0.0] * 4 + [None]
    content = {"task": "student_plugins:Digits", "options": {"digits": 1}}
    at_once = never.model_copy(update={"prompts": TaskSettings.model_validate(content), "run": tmp_path / "at_once"})
    assert train(at_once)["steps"] < 9
    steps: list[int] = []
    train_stage(at_once, lambda done, total: steps.append(done))
    assert steps[-1] == 9


def test_reinforcement_raises_the_reward(begin: Path, tmp_path: Path) -> None:
    plan = ReinforcePlan(steps=12, prompts=4, samples=8, lr=1e-2, warmup=1, max_new_tokens=4)
    low = TaskSettings.model_validate({"task": "student_plugins:Digits", "options": {"digits": 2}})
    train(recipe_of(plan, [low], model=begin, run=tmp_path / "run", seed=0, longest=4))
    rewards = [line["reward"] for line in metrics_of(tmp_path / "run")]
    assert rewards[0] < 0.2 < 0.4 < rewards[-1]


def test_greedy_answers_are_measured_by_the_verifier(begin: Path) -> None:
    examiner = Examiner(begin, longest=8, seed=0)
    assert examiner.accuracy(build_prompts(SUMS, seed=0), 4, (0.0, 1.0)) == [0.0, 0.0]
