"""Runs that learn from rewards beside the verdict: with history, without labels, with the student as the judge."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import metrics_of
from safetensors.torch import load_file

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from student.commands.dry_run import check
from student.job.session import train
from student.settings.recipe import Recipe

JUDGES = """
import time
from opd.tasks.verdict import Verdict

class Even:
    def __init__(self, timeout):
        pass

    def verify(self, prompt, completion):
        return Verdict.of(len(completion) % 2 == 0)

    def extract(self, prompt, completion):
        return completion[:1] or None

    def close(self):
        pass

def short(prompt, answer):
    return None if answer.startswith("1") else -len(answer) / 100

def silent(prompt, answer):
    return None
"""


@pytest.fixture
def alone(recipe_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A recipe of rewards without a server; `answers` says whether prompts have any."""
    (tmp_path / "judges_of_rewards.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*rewards: dict[str, Any], answers: bool = True, **changes: Any) -> Recipe:
        lines = [{"prompt": f"{i + 10}+{i}="} | ({"answer": str(10 + 2 * i)} if answers else {}) for i in range(60)]
        file = tmp_path / f"prompts{answers}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {name: value for name, value in recipe_data.items() if name != "teachers"}
        data |= {
            "prompts": {"file": str(file), "verifier": "judges_of_rewards:Even" if answers else "exact"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "max_new_tokens": 12, "max_prompt_tokens": 32},
            "objective": [{"name": "rloo"}],
            "rewards": list(rewards),
            "eval": {"prompts": 0},
        }
        return parse_settings(Recipe, data | changes)

    return make


def test_a_run_with_a_history_resumes_bit_for_bit(
    alone: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    rewards = [{"name": "hapo"}, {"name": "overlong", "buffer": 4}]
    # Two prompts only, so that they come again.
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    prompts = {"file": str(file), "verifier": "judges_of_rewards:Even", "heldout": 0}
    steps = {"steps": 2, "learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1}
    calm = train(alone(*rewards, run=str(tmp_path / "calm"), prompts=prompts))
    train(alone(*rewards, run=str(tmp_path / "cut"), prompts=prompts, train=steps))
    resumed = train(alone(*rewards, run=str(tmp_path / "cut"), prompts=prompts), resume=True)
    one, two = hashes(Path(calm["checkpoint"])), hashes(Path(resumed["checkpoint"]))
    assert one == two
    lines = metrics_of(tmp_path / "cut")
    assert lines[0]["hapo/known_prompts"] == 0.0 and lines[-1]["hapo/known_prompts"] > 0
    for line in lines:
        assert line["reward"] == pytest.approx(
            line["verdict"] + line["reward_part/hapo"] + line["reward_part/overlong"], abs=1e-6
        )
        assert line["overlong/bites"] > 0 and line["unknown_share"] == 0.0


@pytest.mark.parametrize(
    ("reward", "length"),
    [
        ({"name": "ttrv", "diversity": 0.0}, 1),  # so short that some of a group agree
        ({"name": "function", "function": "judges_of_rewards:short"}, 12),
    ],
    ids=["ttrv", "function"],
)
def test_rewards_without_labels_need_no_answers(
    alone: Callable[..., Recipe], tmp_path: Path, reward: dict[str, Any], length: int
) -> None:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": length, "max_prompt_tokens": 32}
    recipe = alone(reward, answers=False, run=str(tmp_path / "run"), rollout=rollout)
    assert "rewards" in check(recipe, offline=False)
    train(recipe)
    lines = metrics_of(recipe.run)
    assert all("verdict" not in line and "unknown_share" not in line for line in lines)
    assert all(line["grad_norm"] > 0 and "reward" in line for line in lines)


def test_the_student_judges_by_its_own_probability_of_the_reference(
    alone: Callable[..., Recipe], tmp_path: Path
) -> None:
    # A digit as the mark, which the student of the test world writes now and then.
    reward = {"name": "rlpr", "answer_start": "1", "answer_end": "", "format_weight": 0.1}
    recipe = alone(reward, run=str(tmp_path / "run"))
    train(recipe)
    lines = metrics_of(recipe.run)
    assert all(line["cost/train/local_positions"] > 0 for line in lines if line["reward"] > 0)
    assert any(line["reward"] > 0 for line in lines)


def test_a_step_without_any_reward_is_skipped_and_said(
    alone: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = alone({"name": "function", "function": "judges_of_rewards:silent"}, run=str(tmp_path / "run"))
    summary = train(recipe)
    lines = metrics_of(recipe.run)
    assert all(line["updates"] == 0 and line["updates_skipped"] == 1 for line in lines)
    assert all(line["silent/unknown"] == 1.0 and "reward" not in line for line in lines)
    assert "had no row to learn from and were skipped" in capsys.readouterr().err + caplog.text
    start, end = (load_file(folder / "model.safetensors") for folder in (Path(recipe.model.path), model_of(summary)))
    assert all(torch.equal(end[name], tensor.float()) for name, tensor in start.items())


def model_of(summary: dict[str, Any]) -> Path:
    return Path(summary["checkpoint"]) / "model"


def test_without_a_reward_of_their_own_prompts_without_answers_are_refused(alone: Callable[..., Recipe]) -> None:
    with pytest.raises(DataError, match="answer to judge by"):
        check(alone({"name": "overlong", "buffer": 4}, answers=False), offline=False)


@pytest.mark.parametrize(
    ("rewards", "changes", "words"),
    [
        ([{"name": "overlng"}], {}, "did you mean 'overlong'"),
        ([{"name": "dler"}, {"name": "rl_struct"}], {}, "each give the whole reward"),
        ([{"name": "hapo"}, {"name": "hapo"}], {}, "named twice"),
        ([{"name": "hapo"}], {"objective": [{"name": "sft", "rows": "all"}]}, "no term learns from them"),
        ([{"buffer": 3}], {}, "rewards.0 has no name"),
        ([{"name": "function", "function": "judges_of_rewards:long"}], {}, "cannot be imported"),
    ],
)
def test_rewards_that_cannot_work_are_refused(
    alone: Callable[..., Recipe], rewards: list[dict[str, Any]], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(alone(*rewards, **changes), offline=True)
