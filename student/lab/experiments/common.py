"""What the experiments share: the base recipe, its short form and the learning rates of the sweep."""

from typing import Any

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
"""The short form: it shows that everything runs, not that anything holds."""


def recipe(*, steps: int, rows: int, length: int, objective: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The base recipe of an experiment.

    Args:
        steps: optimizer steps.
        rows: prompts per step, one answer each.
        length: longest answer, tokens.
        objective: its one term.
        more: further groups of the recipe.
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
        # Enough for the rate and the plateau; the final weights are judged on 8 answers to each prompt.
        "eval": {"every": steps // 10, "prompts": 256, "temperature": 1.0},
        **more,
    }
