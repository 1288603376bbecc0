"""Rows and plans to and from checkpoints.

Of a row: what was sampled, its reward and its labels, but no signals of models. Plans are those of steps whose rows
were still being sampled when the run was saved.
"""

from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from opd.tasks.prompt import Prompt
from student.data.plan import EpisodePlan, PlannedRow, StepPlan
from student.data.row import EpisodeTrace, Row, RowKey

_ARRAYS = {
    "prompt_ids": np.uint32,
    "response_ids": np.uint32,
    "behaviour_logp": np.float32,
    "policy_version": np.int32,
    "loss_mask": np.bool_,
    "candidates": np.uint32,
    "behaviour_prompt_ids": np.uint32,
    "token_rewards": np.float32,
    "moe_routes": np.int16,
}
_PLAIN = ("truncated", "text", "origin", "teacher", "reward", "rewarded", "weight", "trained")


def row_to_state(row: Row) -> dict[str, Any]:
    """JSON values and arrays, for `student.state.state_io`."""
    state: dict[str, Any] = {name: getattr(row, name) for name in _PLAIN}
    state |= {name: value.copy() for name in _ARRAYS if (value := getattr(row, name)) is not None}
    return state | {
        "key": asdict(row.key),
        "prompt": prompt_to_state(row.prompt),
        "turns": [list(turn) for turn in row.turns],
        "episode": None if row.episode is None else _episode_to_state(row.episode),
        "turn_rewards": list(row.turn_rewards),
        "reward_parts": dict(row.reward_parts),
        "tags": dict(row.tags),
    }


def row_from_state(state: dict[str, Any]) -> Row:
    """The row that `row_to_state` was given, without signals, verdict and notes."""
    arrays: dict[str, Any] = {name: np.asarray(state[name], dtype) for name, dtype in _ARRAYS.items() if name in state}
    return Row(
        key=RowKey(**state["key"]),
        prompt=Prompt.restored(state["prompt"]),
        turns=tuple((int(start), int(end)) for start, end in state["turns"]),
        episode=None if state["episode"] is None else _episode(state["episode"]),
        turn_rewards=tuple(state["turn_rewards"]),
        reward_parts=dict(state["reward_parts"]),
        tags=dict(state["tags"]),
        **arrays,
        **{name: state[name] for name in _PLAIN},
    )


def _episode_to_state(episode: EpisodeTrace) -> dict[str, Any]:
    return {
        "tool_mask": episode.tool_mask.copy(),
        "windows": [list(window) for window in episode.windows],
        **{name: list(getattr(episode, name)) for name in ("summaries", "states", "agents")},
    }


def _episode(state: dict[str, Any]) -> EpisodeTrace:
    return EpisodeTrace(
        np.asarray(state["tool_mask"], np.bool_),
        tuple((int(since), int(start), int(end)) for since, start, end in state["windows"]),
        tuple(map(int, state["summaries"])),
        tuple(state["states"]),
        tuple(state["agents"]),
    )


def prompt_to_state(prompt: Prompt) -> dict[str, Any]:
    """JSON values."""
    return {field.name: getattr(prompt, field.name) for field in fields(Prompt)}


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
            "episode": None if row.episode is None else _played_to_state(row.episode),
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
            episode=None if row["episode"] is None else _played(row["episode"]),
        )
        for row in state["rows"]
    ]
    return StepPlan(int(state["step"]), tuple(rows))


def _played_to_state(episode: EpisodePlan) -> dict[str, Any]:
    # A branch exists only within a step.
    return asdict(replace(episode, branch=None))


def _played(state: dict[str, Any]) -> EpisodePlan:
    replay, passed_over = (tuple(state[name]) for name in ("replay", "passed_over"))
    return EpisodePlan(int(state["turns"]), replay, bool(state["given"]), passed_over)
