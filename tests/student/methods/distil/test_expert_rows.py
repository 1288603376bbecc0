"""Which rows are given: GKD's share, the cold start, recorded answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.modes import ModeSettings
from opd.tasks.prompt import Prompt
from student.data.plan import StepPlan, plan_step
from student.job.plugins import build_plugins
from student.methods.distil.expert_rows import ExpertRows, ExpertRowsSettings
from student.plugin.controllers import begin
from student.settings.recipe import Recipe

PROMPTS = [Prompt.make(f"{i}+1=", answer=str(i + 1), extra={"solution": f":{i + 1}"}) for i in range(10)]


def controller(**settings: Any) -> ExpertRows:
    return ExpertRows(parse_settings(ExpertRowsSettings, {"name": "expert_rows", **settings}))


def plan(step: int = 0, prompts: list[Prompt] = PROMPTS, samples: int = 1) -> StepPlan:
    return plan_step(step, prompts, samples=samples, max_new_tokens=12, temperature=1.0)


def given(made: StepPlan) -> list[int]:
    return [i for i, row in enumerate(made.rows) if row.answer is not None]


def test_a_fixed_share_of_each_step_is_given_and_which_rows_changes() -> None:
    made = controller(share=0.3)
    chosen = [given(made.plan(plan(step))) for step in range(8)]
    assert all(len(rows) == 3 for rows in chosen)
    assert len({tuple(rows) for rows in chosen}) > 1
    assert chosen == [given(controller(share=0.3).plan(plan(step))) for step in range(8)]
    assert chosen != [given(controller(share=0.3, seed=1).plan(plan(step))) for step in range(8)]


def test_a_cold_start_gives_every_row_and_ends() -> None:
    made = controller(cold_steps=2)
    assert [len(given(made.plan(plan(step)))) for step in range(4)] == [10, 10, 0, 0]


def test_answers_are_the_solution_or_the_reference_answer() -> None:
    rows = controller(share=1.0).plan(plan()).rows
    assert [row.answer for row in rows] == [prompt.extra["solution"] for prompt in PROMPTS]
    rows = controller(share=1.0, source="answer").plan(plan()).rows
    assert [row.answer for row in rows] == [prompt.answer for prompt in PROMPTS]


def test_a_problem_has_an_answer_of_its_own_in_every_mode(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = {"L0+1=": "1, since 0 is nothing", "S0+1=": "1"}
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in answers.items()))
    made = controller(share=1.0, source="file", file=str(path))
    begin(made, None)  # type: ignore[arg-type]
    asked = [ModeSettings(budget=8, prefix=mark).mark(PROMPTS[0], mark) for mark in ("S", "L")]
    assert [row.answer for row in made.plan(plan(prompts=asked)).rows] == ["1", "1, since 0 is nothing"]


def test_recorded_answers_go_round_the_samples_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": "0+1=", "answer": a}) + "\n" for a in ("x", "y")))
    made = controller(share=0.5, source="file", file=str(path))
    begin(made, None)  # type: ignore[arg-type]
    rows = made.plan(plan(prompts=PROMPTS[:2], samples=3)).rows
    assert [row.answer for row in rows] == ["x", "y", "x", None, None, None]


def test_too_few_answers_are_an_error_that_names_a_prompt() -> None:
    bare = Prompt.make("who?")
    with pytest.raises(DataError, match=bare.uid):
        controller(share=1.0).plan(plan(prompts=[*PROMPTS, bare]))
    assert len(given(controller(share=0.5).plan(plan(prompts=[*PROMPTS, bare])))) == 6


@pytest.mark.parametrize(
    ("settings", "word"),
    [({}, "both 0"), ({"share": 0.5, "source": "file"}, "needs a file"), ({"share": 0.5, "file": "x"}, "source: file")],
)
def test_settings_that_cannot_work_are_refused_with_a_reason(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        controller(**settings)


@pytest.mark.parametrize(
    ("objective", "word"),
    [
        ([{"name": "opd", "payload": "sampled"}], "payload sampled"),
        ([{"name": "opd", "rows": "sampled"}, {"name": "grpo"}], "no term learns"),
    ],
)
def test_an_objective_that_cannot_use_given_rows_is_refused_before_the_first_step(
    objective: list[dict[str, Any]], word: str
) -> None:
    data = {"run": "x", "model": {"path": "x"}, "teachers": {"endpoints": ["x:1"]}, "prompts": {"task": "addition"}}
    data["rollout"] = {"samples_per_prompt": 2}
    methods = [{"name": "expert_rows", "share": 0.5}]
    with pytest.raises(ConfigError, match=word):
        build_plugins(parse_settings(Recipe, {**data, "objective": objective, "methods": methods}))
    build_plugins(parse_settings(Recipe, {**data, "objective": [*objective, {"name": "sft"}][1:], "methods": methods}))
