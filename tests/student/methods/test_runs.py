"""Methods through the whole loop, with a real server: two teachers by domain, references, given rows, rewards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_records import metrics_of
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.config import parse_settings
from opd.fleet.client import TeacherFleet
from opd.tasks.build import build_prompts
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import REFERENCE, TEACHER
from student.data.plan import plan_step
from student.job.plugins import build_plugins
from student.job.session import train
from student.rollout.transformers import RolloutSpec, rollout
from student.scoring.score import Scoring
from student.scoring.verify import Verification
from student.settings.recipe import Recipe

MIX = {
    "mix": [
        {"task": "addition", "options": {"digits": 2}},
        {"task": "subtraction", "options": {"digits": 2}},
    ]
}


@pytest.fixture
def run(world: Path, teacher: Any, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Train the given recipe for a few steps; returns the summary and the metrics of each step."""

    def make(
        *objective: dict[str, Any], routes: dict[str, str] | None = None, **changes: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        data = {
            "run": str(tmp_path / f"run{len(list(tmp_path.iterdir()))}"),
            "model": {"path": str(world / "student")},
            "teachers": {
                "endpoints": [teacher.address],
                "default": "teacher",
                "reference": "student",
                "routes": routes or {},
            },
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {"prompts_per_step": 6, "samples_per_prompt": 2, "max_new_tokens": 12, "max_prompt_tokens": 32},
            "objective": list(objective),
            "train": {"steps": 3, "learning_rate": 1e-3, "threads": 1},
            "eval": {"prompts": 0},
            **changes,
        }
        recipe = parse_settings(Recipe, data)
        summary = train(recipe)
        return summary, metrics_of(recipe.run)

    return make


def test_two_domains_learn_from_two_teachers(world: Path, teacher: Any) -> None:
    recipe = parse_settings(
        Recipe,
        {
            "run": "unused",
            "model": {"path": str(world / "student")},
            "prompts": MIX,
            "teachers": {
                "endpoints": [teacher.address],
                "routes": {"addition": "teacher", "subtraction": "student"},
                "reference": "student",
            },
            "objective": [{"name": "exopd", "payload": "sampled"}],
        },
    )
    source, needs = build_prompts(recipe.prompts, seed=0), build_plugins(recipe).needs
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    plan = plan_step(0, source.prompts("train", 8), samples=1, max_new_tokens=6, temperature=1.0)
    with TeacherFleet.connect([teacher.address]) as fleet:
        scorer = Scoring(fleet, recipe.teachers, needs, Verification(source, 2), torch.device("cpu"))
        rows = rollout(model, tokenizer, plan.rows, RolloutSpec(0, 8, 0, len(tokenizer), 32), on_row=scorer.ask)
        scorer.wait(rows)
        served = {"addition": "teacher", "subtraction": "student"}
        assert {row.prompt.domain for row in rows} == set(served)
        for row in rows:
            assert row.teacher == served[str(row.prompt.domain)]
            for role, name in ((TEACHER, row.teacher), (REFERENCE, "student")):
                (expected,) = fleet.score(name, [row.asked(gather=False)[0][0]], PayloadSpec.sampled())
                signal = row.signals[role, PayloadKind.SAMPLED]
                assert signal.sampled is not None and expected.sampled is not None
                np.testing.assert_allclose(signal.sampled, expected.sampled, atol=1e-5)
    source.close()


@pytest.mark.parametrize("payload", ["gather", *slow("sampled", "hidden")])
def test_exopd_runs_against_the_initial_student_as_reference(run: Callable[..., Any], payload: str) -> None:
    _, steps = run({"name": "exopd", "payload": payload})
    assert all(np.isfinite(step["reverse_kl_to_target"]) and step["grad_norm"] > 0 for step in steps)
    if payload != "hidden":
        assert steps[0]["reward_scale"] == pytest.approx(1.25)
        assert steps[0]["implicit_reward"] != 0


def test_two_teachers_by_domain_and_a_reference_run_with_exact_targets(run: Callable[..., Any]) -> None:
    routes = {"addition": "teacher", "subtraction": "student"}
    _, steps = run({"name": "exopd", "payload": "hidden"}, prompts=MIX, routes=routes)
    assert all(step["grad_norm"] > 0 for step in steps)


def test_a_cold_start_is_supervised_and_then_distils(run: Callable[..., Any]) -> None:
    _, steps = run(
        {"name": "sft"},
        {"name": "opd", "k": 8, "rows": "sampled"},
        {"name": "reference_kl", "weight": 0.1},
        methods=[{"name": "expert_rows", "cold_steps": 2}],
    )
    assert [step["expert_share"] for step in steps] == [1.0, 1.0, 0.0]
    assert [step["loss/opd"] == 0 for step in steps] == [True, True, False]
    assert [step["loss/sft"] == 0 for step in steps] == [False, False, True]
    assert steps[0]["cost/train/sampled_tokens"] == 0 < steps[2]["cost/train/sampled_tokens"]
    assert all(step["grad_norm"] > 0 for step in steps)


def test_gkd_mixes_given_and_sampled_rows_in_one_divergence(run: Callable[..., Any]) -> None:
    _, steps = run(
        {"name": "opd", "payload": "topk", "k": 8, "divergence": "jsd", "mixture": 0.5},
        methods=[{"name": "expert_rows", "share": 0.5}, {"name": "mask_tokens", "tokens": {"texts": [":"]}}],
    )
    assert [step["expert_share"] for step in steps] == [0.5] * 3
    assert all(step["jsd"] > 0 and 0 < step["masked_share"] < 1 for step in steps)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_reinforcement_needs_no_teacher(run: Callable[..., Any], name: str) -> None:
    _, steps = run({"name": name}, teachers=None)
    assert all(step["known_share"] == 1.0 and np.isfinite(step[f"loss/{name}"]) for step in steps)
    assert all("cost/train/teacher_positions" not in step for step in steps)


def test_reinforcement_with_a_penalty_asks_the_reference_alone(run: Callable[..., Any]) -> None:
    _, steps = run({"name": "grpo"}, {"name": "reference_kl", "form": "k3_loss", "weight": 0.001})
    assert steps[0]["cost/train/reference_positions"] > 0
    assert "cost/train/teacher_positions" not in steps[0]
