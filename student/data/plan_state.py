"""Plans to and from checkpoints, for steps whose rows were still being sampled when the run was saved."""

from dataclasses import asdict, replace
from typing import Any

from opd.tasks.prompt import Prompt
from student.data.plan import EpisodePlan, PlannedRow, StepPlan
from student.data.row import RowKey
from student.data.row_state import prompt_to_state


def plan_to_state(plan: StepPlan) -> dict[str, Any]:
    """JSON values; a prompt that several rows share is written once."""
    numbers: dict[int, int] = {}  # by id(): the plan keeps its prompts alive, so an id cannot be reused meanwhile
    prompts: list[dict[str, Any]] = []

    def number(prompt: Prompt) -> int:
        if id(prompt) not in numbers:
            numbers[id(prompt)] = len(prompts)
            prompts.append(prompt_to_state(prompt))
        return numbers[id(prompt)]

    rows = [
        {
            "key": asdict(row.key),
            "prompt": number(row.prompt),
            "behaviour_prompt": None if row.behaviour_prompt is None else number(row.behaviour_prompt),
            "max_new_tokens": row.max_new_tokens,
            "temperature": row.temperature,
            "answer": row.answer,
            "prefix_ids": list(row.prefix_ids),
            "stop_ids": sorted(row.stop_ids),
            "tags": dict(row.tags),
            "episode": None if row.episode is None else _episode_to_state(row.episode),
        }
        for row in plan.rows
    ]
    return {"step": plan.step, "prompts": prompts, "rows": rows}


def plan_from_state(state: dict[str, Any]) -> StepPlan:
    """The plan that `plan_to_state` was given."""
    prompts = [Prompt.restored(prompt) for prompt in state["prompts"]]
    rows = [
        PlannedRow(
            key=RowKey(**row["key"]),
            prompt=prompts[row["prompt"]],
            max_new_tokens=int(row["max_new_tokens"]),
            temperature=float(row["temperature"]),
            answer=row["answer"],
            prefix_ids=tuple(row["prefix_ids"]),
            behaviour_prompt=None if row["behaviour_prompt"] is None else prompts[row["behaviour_prompt"]],
            stop_ids=frozenset(row["stop_ids"]),
            tags=dict(row["tags"]),
            episode=None if row["episode"] is None else _episode(row["episode"]),
        )
        for row in state["rows"]
    ]
    return StepPlan(int(state["step"]), tuple(rows))


def _episode_to_state(episode: EpisodePlan) -> dict[str, Any]:
    # A branch exists only within a step.
    return asdict(replace(episode, branch=None))


def _episode(state: dict[str, Any]) -> EpisodePlan:
    replay, passed_over = (tuple(state[name]) for name in ("replay", "passed_over"))
    return EpisodePlan(int(state["turns"]), replay, bool(state["given"]), passed_over)
