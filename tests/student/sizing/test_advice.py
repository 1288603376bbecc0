"""What a plan says that would make a step faster, and what it counts of prompts that rows share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import tiny

from opd.config import parse_settings
from student.settings.recipe import Recipe
from student.sizing.hardware import Hardware
from student.sizing.plan import describe

CPU = Hardware("the CPU here", 16e9, 1e9, 1e10, 1e-6, 0.0, overlaps=False, half=2.0)


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny("qwen3", vocab_size=4096, max_position_embeddings=2048).config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def lines(path: str, device: Hardware = CPU, **groups: dict[str, Any]) -> str:
    data: dict[str, Any] = {
        "run": "run",
        "model": {"path": path},
        "prompts": {"task": "addition"},
        "teachers": {"endpoints": ["127.0.0.1:1"]},
        "objective": [{"name": "opd", "k": 8}],
        "rollout": {"prompts_per_step": 4, "max_prompt_tokens": 512, "max_new_tokens": 64},
    }
    data = {key: value | groups.get(key, {}) if isinstance(value, dict) else value for key, value in data.items()}
    return "\n".join(describe(parse_settings(Recipe, groups | data), device))


def seconds(plan: str, stage: str) -> float:
    return next(float(line.split()[1]) for line in plan.splitlines() if line.split()[:1] == [stage])


def test_a_plan_says_what_bf16_and_a_lag_would_gain_where_they_gain(model: str) -> None:
    plan = lines(model, replace(CPU, spare=True))
    assert "train.mixed_precision: bf16 would make a step" in plan and "2.0 times as fast here" in plan
    assert "train.max_staleness: 1 would make a step" in plan and "opd does not work with it" in plan
    assert "would make" not in lines(model, replace(CPU, half=1.05))


def test_a_plan_for_bf16_counts_with_its_speed(model: str) -> None:
    plain, half = lines(model), lines(model, train={"mixed_precision": "bf16"})
    assert seconds(half, "learn") == pytest.approx(seconds(plain, "learn") / 2, abs=0.02)
    assert "mixed_precision" not in half


def test_a_plan_counts_a_prompt_that_rows_share_once(model: str) -> None:
    rollout = {"samples_per_prompt": 8}
    shared = lines(model, rollout=rollout)
    whole = lines(model, rollout=rollout, train={"shared_prompts": False})
    # Rows of 256 + 32 tokens, of which 7 of 8 do not read the first 256.
    assert "once for all rows of a micro-batch, 78% less" in shared and "once for all" not in whole
    assert seconds(shared, "learn") == pytest.approx(seconds(whole, "learn") * (1 - 7 / 9), abs=0.02)
    assert "reads a prompt again for each of its rows" in lines(model, rollout=rollout, model={"dropout": True})
