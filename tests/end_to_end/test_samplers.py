"""Samplers and rollout strategies in a real run, on rewards and on the signal of a teacher."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_records import metrics_of

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = pytest.mark.zoo


def recipe(world: Path, folder: Path, **changes: Any) -> Recipe:
    table = folder / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "domain": f"d{i % 2}"} for i in range(12)]
    table.write_text("\n".join(map(json.dumps, rows)))
    return parse_settings(
        Recipe,
        {
            "run": str(folder / "run"),
            "model": {"path": str(world / "student")},
            "prompts": {"file": str(table), "verifier": "numeric", "heldout": 0},
            "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 6, "max_prompt_tokens": 16},
            "objective": [{"name": "grpo"}],
            "train": {"steps": 5, "learning_rate": 1e-3, "threads": 1},
            "eval": {"prompts": 0},
            **changes,
        },
    )


def steps_of(made: Recipe) -> list[dict[str, Any]]:
    train(made)
    return metrics_of(made.run)


def test_a_chain_of_samplers_chooses_weighs_and_asks_in_templates(world: Path, tmp_path: Path) -> None:
    methods = [
        {"name": "mopps"},
        {"name": "rollout_gdro", "by": "domain", "least": 1},
        {"name": "prompt_gdro", "by": "domain"},
        {"name": "prompt_augmentation", "templates": [{"text": "{prompt}"}, {"text": "={prompt}", "prefix": "1"}]},
    ]
    steps = steps_of(recipe(world, tmp_path, methods=methods))
    assert all(step["sampled_rows"] == 6 for step in steps)
    assert any(step["mopps/replaced"] > 0 for step in steps) and steps[-1]["mopps/known"] > 0
    assert steps[-1]["rollout_gdro/known"] > 0 and "prompt_gdro/moved" in steps[-1]
    assert max(step["prompt_augmentation/templates"] for step in steps) == 2
    saved = json.loads((tmp_path / "run/checkpoints/step-000005/trainer/loop.json").read_text())
    assert saved["methods"]["mopps"]["counts"] and saved["methods"]["rollout_gdro"]["average"]


def test_a_prompt_that_its_template_makes_too_long_is_asked_as_it_is(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    templates = [{"text": "{prompt}"}, {"text": "=" * 16 + "{prompt}", "prefix": "1"}]
    methods = [{"name": "prompt_augmentation", "templates": templates}]
    steps = steps_of(recipe(world, tmp_path, methods=methods, train={"steps": 3, "threads": 1}))
    shares = [step["prompt_augmentation/too_long_share"] for step in steps]
    assert len(steps) == 3 and max(shares) > 0 and min(shares) < 1
    assert sum("longer than rollout.max_prompt_tokens" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["gps"])
def test_a_sampler_reads_what_a_teacher_says(world: Path, teacher: Any, tmp_path: Path, name: str) -> None:
    steps = steps_of(
        recipe(
            world,
            tmp_path,
            objective=[{"name": "opd", "k": 8}],
            teachers={"endpoints": [teacher.address], "default": "teacher"},
            methods=[{"name": name, "signal": "divergence"}],
            train={"steps": 3, "learning_rate": 1e-3, "threads": 1},
        )
    )
    assert steps[-1][f"{name}/known"] == 1.0 and steps[-1][f"{name}/informative_share"] == 1.0


def test_hinted_answers_are_learnt_from_under_the_plain_prompt(world: Path, tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 3, "max_new_tokens": 6, "max_prompt_tokens": 32}
    steps = steps_of(
        recipe(
            world,
            tmp_path,
            rollout={**rollout, "strategy": {"name": "icpo", "examples": ["1+1=2", "2+2=4" * 9], "least": 0.0}},
            objective=[{"name": "mixed_context", "denominator": "one"}],
        )
    )
    assert all(step["hinted_share"] == pytest.approx(1 / 3) and step["hinted_tokens"] > 0 for step in steps)
    assert any(step["hint/cut_share"] > 0 for step in steps) and not any(step["hint/too_long_share"] for step in steps)
    assert all(step["reward_part/icpo"] > 0.9 and step["grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize("strategy", [{"name": "replay", "share": 1.0}, {"name": "rorecomp", "wait": 1}])
def test_groups_of_earlier_steps_are_learnt_from(world: Path, tmp_path: Path, strategy: dict[str, Any]) -> None:
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 2, "max_prompt_tokens": 16}
    steps = steps_of(
        recipe(
            world,
            tmp_path,
            rollout={**rollout, "strategy": strategy},
            objective=[{"name": "cispo", "rows": "all"}],
            rewards=[{"name": "ttrv", "diversity": 0.0}],
        )
    )
    assert steps[0]["replayed_share"] == 0 and max(step["replayed_share"] for step in steps) > 0
    assert all(step["sampled_rows"] == 12 for step in steps)


def test_replayed_rows_have_what_models_critics_and_methods_put_on_rows(world: Path, tmp_path: Path) -> None:
    """Mrs and the penalty read models, ace the reference, gae the critic's values and rewards by token."""
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 2, "max_prompt_tokens": 16}
    steps = steps_of(
        recipe(
            world,
            tmp_path,
            teachers={"reference": "initial"},
            rollout={**rollout, "strategy": {"name": "replay", "share": 1.0}},
            objective=[
                {"name": "ppo", "rows": "all"},
                {"name": "cispo", "rows": "all", "advantage": [{"name": "group_mean"}, {"name": "ace"}]},
            ],
            rewards=[{"name": "ttrv", "diversity": 0.0}, {"name": "kl_penalty"}],
            methods=[{"name": "mrs", "low": 0, "high": 99}, {"name": "critic"}, {"name": "prompt_augmentation"}],
        )
    )
    replayed = [step for step in steps if step["replayed_share"] > 0]
    assert replayed and all(step["grad_norm"] > 0 and "critic_loss" in step for step in replayed)
    assert all(step["mrs/mean_ratio"] > 0 for step in replayed)
