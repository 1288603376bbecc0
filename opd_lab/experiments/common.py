"""Shared parts of the experiments: the base recipe, its short form and the learning rates of sweeps."""

from collections.abc import Iterable
from typing import Any

from opd_lab.experiment import Arm, Claim

RATES = (3e-4, 1e-3, 3e-3)
"""Learning rates of sweeps, a factor of about three apart."""

QUICK: dict[str, Any] = {
    "train.steps": 4,
    "train.warmup_steps": 1,
    "eval.every": 2,
    "eval.prompts": 16,
    "rollout.prompts_per_step": 8,
    "train.checkpoint_every": 2,
}
"""Overrides of the short form, which shows only that everything runs."""
_LOOKS = 6
"""Number of evaluations in a run of episodes; there are few because an episode costs as much as many answers."""


def claims_about(claims: Iterable[Claim], arms: Iterable[Arm]) -> tuple[Claim, ...]:
    """The claims whose arm is among `arms` and whose rival is too, or is a model or a number."""
    known = {arm.name for arm in arms}
    return tuple(
        claim
        for claim in claims
        if claim.arm in known and (claim.rival in known or claim.rival.startswith(("model:", "value:")))
    )


def lasting(steps: int) -> dict[str, Any]:
    """Overrides of an arm of episodes that trains for `steps` steps, with as many evaluations as the other arms."""
    return {"train.steps": steps, "eval.every": max(1, steps // _LOOKS)}


def episodes_recipe(*, steps: int, prompts: int, turns: int, turn_tokens: int, **more: Any) -> dict[str, Any]:
    """The base recipe of an experiment whose answers are episodes.

    Args:
        steps: number of training steps.
        prompts: number of episodes of an evaluation; few enough that a run does not evaluate longer than it trains.
        turns: maximum turns of an episode.
        turn_tokens: maximum tokens of the student in a turn.
        more: further arguments of `recipe`.
    """
    found = recipe(steps=steps, eval={"every": steps // _LOOKS, "prompts": prompts, "temperature": 1.0}, **more)
    found["train"]["warmup_steps"] = 4
    found["rollout"]["episodes"] = {"turns": turns, "turn_tokens": turn_tokens, "isolation": "none"}
    return found


def recipe(*, steps: int, rows: int, length: int, objective: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The base recipe of an experiment.

    Args:
        steps: number of training steps.
        rows: number of prompts per step, each with one answer.
        length: maximum tokens of an answer.
        objective: the only term of the objective.
        more: further groups of the recipe, which replace those made here.
    """
    return {
        "rollout": {
            "prompts_per_step": rows,
            "max_new_tokens": length,
            "max_prompt_tokens": 128,
            "batch_rows": 512,
        },
        "objective": [objective],
        "train": {
            "steps": steps,
            "learning_rate": 1e-3,
            "warmup_steps": 10,
            "micro_batch_tokens": 4096,
            "checkpoint_every": 50,
            "keep_checkpoints": 1,
            "betas": [0.9, 0.98],
        },
        # Enough to choose rates and to judge the plateau; the final weights are judged on 8 answers to each prompt.
        "eval": {"every": steps // 10, "prompts": 256, "temperature": 1.0},
        **more,
    }
