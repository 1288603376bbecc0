"""RLTF: second attempts without the feedback, and the feedback itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.wire.types import Scores
from opd_zoo.distil.rltf import Rltf, RltfSettings
from student.data.outcome import outcome_of
from student.data.row import EpisodeTrace, Row, RowKey
from student.job.plugins import build_plugins
from student.plugin.controllers import begin
from student.settings.recipe import Recipe

PROMPT = Prompt.make("x")


def episode(sample: int, *rewards: float) -> Row:
    """Attempts of two tokens with three of feedback between them."""
    length = 5 * len(rewards) - 3
    mask = np.array([place % 5 < 2 for place in range(length)])
    return Row(
        key=RowKey(3, PROMPT.uid, sample),
        prompt=PROMPT,
        prompt_ids=np.array([90, 91], np.uint32),
        response_ids=np.arange(length, dtype=np.uint32),
        behaviour_logp=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_version=np.full(length, 3, np.int32),
        loss_mask=mask,
        truncated=False,
        text="",
        episode=EpisodeTrace(~mask),
        turns=tuple((5 * turn, 5 * turn + 2) for turn in range(len(rewards))),
        turn_rewards=rewards,
        tags={"ended": "success"},
    )


def method(form: str) -> Rltf:
    made = Rltf(parse_settings(RltfSettings, {"name": "rltf", "form": form}))
    read = [Scores(sampled=np.array(values, np.float32)) for values in ((-1.0, -7.0), (-2.0, -3.0), (-6.0, -9.0))]
    begin(made, SimpleNamespace(read=lambda rows: read[: len(rows)]))  # type: ignore[arg-type]
    return made


def test_second_attempts_answer_the_bare_problem_against_the_mean_of_first_ones() -> None:
    rows = [episode(0, 0.0, 1.0), episode(1, 0.0, 0.0), episode(2, 1.0)]
    rltf = method("sd")
    *own, right, wrong = rltf.compose(rows)
    assert own == rows
    assert right.prompt_ids.tolist() == [90, 91] and right.response_ids.tolist() == [5, 6]
    assert right.behaviour_prompt_ids is not None
    assert right.behaviour_prompt_ids.tolist() == [90, 91, 0, 1, 2, 3, 4]
    assert right.origin == "hinted" and not right.on_policy and right.rewarded
    assert right.reward == pytest.approx(1 - 1 / 3) and wrong.reward == pytest.approx(-1 / 3)
    assert right.loss_mask.tolist() == [True, False]  # the second token is too unlikely without the feedback
    assert right.behaviour_logp.tolist() == [-1.0, -7.0]
    services: Any = SimpleNamespace(outcomes=[outcome_of(row) for row in (*own, right, wrong)])
    found = rltf.after_update(3, services)
    assert found == {"rltf_rows": 2.0, "rltf_advantage": pytest.approx(1 / 6), "rltf_masked": 0.25}


def test_second_attempts_that_are_all_right_still_teach() -> None:
    rows = [episode(0, 0.0, 1.0), episode(1, 0.0, 1.0)]
    assert [row.reward for row in method("sd").compose(rows)[2:]] == [1.0, 1.0]


def test_a_second_attempt_without_a_likely_token_is_left_out() -> None:
    rows = [episode(sample, 0.0, 1.0) for sample in range(3)]
    assert len(method("sd").compose(rows)) == 5


def test_feedback_is_learnt_after_the_first_attempt_and_carries_no_reward() -> None:
    _, told = method("fm").compose([episode(0, 0.0, 1.0)])
    assert told.prompt_ids.tolist() == [90, 91, 0, 1] and told.response_ids.tolist() == [2, 3, 4]
    assert told.origin == "expert" and told.loss_mask.all() and outcome_of(told).reward is None
    assert method("fm").compose([broken := episode(0, 0.0)]) == [broken]


def test_objectives_that_do_not_learn_from_its_rows_are_refused() -> None:
    def build(*objective: dict[str, Any], form: str = "sd") -> None:
        data = {
            "run": "run",
            "model": {"path": "student"},
            "prompts": {"task": "addition"},
            "teachers": {"endpoints": ["h:1"]},
            "objective": list(objective),
            "methods": [{"name": "rltf", "form": form}],
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 64},
            "train": {"steps": 1, "learning_rate": 1e-3},
        }
        build_plugins(parse_settings(Recipe, data))

    second = {"name": "policy_gradient", "rows": "expert", "ratio": "none", "advantage": {"name": "reinforce"}}
    build(second)
    build({"name": "sft", "weight": 0.1}, form="fm")
    with pytest.raises(ConfigError, match="add policy_gradient with rows: expert"):
        build({"name": "policy_gradient", "advantage": {"name": "trloo"}})
    with pytest.raises(ConfigError, match="needs scores"):
        build(second, {"name": "opd", "rows": "sampled"})
