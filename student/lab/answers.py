"""Answers of a teacher to training prompts, written once per experiment for arms that learn from a file.

Each line: {"prompt": ..., "answer": ..., "tokens": ...}; sampled at temperature 1 in a fixed random stream.
"""

import json
from collections.abc import Callable

import torch

from opd.tasks.source import build_prompts
from student.lab.experiment import TUNING_SEED, Arm
from student.lab.plan import Plan
from student.model import load_student
from student.plan import plan_step
from student.recipe import Recipe
from student.rollout.transformers import RolloutSpec, rollout


def write_answers(plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
    """Write `plan.answers` unless it is there: one answer for each row that a run of the experiment trains on."""
    if plan.answers.is_file() or plan.experiment.answers_of is None:
        return
    torch.set_num_threads(1)
    recipe = Recipe.model_validate({"run": "unused", **plan.recipe(Arm("answers", ""), TUNING_SEED + 1, 1e-3)})
    settings = recipe.rollout
    count = recipe.train.steps * settings.prompts_per_step * settings.samples_per_prompt
    source = build_prompts(recipe.prompts, seed=recipe.seed)
    model, tokenizer = load_student(
        str(plan.cast.model(plan.experiment.answers_of).path),
        dtype="float32",
        attention=None,
        gradient_checkpointing=False,
    )
    spec = RolloutSpec(recipe.seed, 256, 0, len(tokenizer), settings.max_prompt_tokens)
    plan.folder.mkdir(parents=True, exist_ok=True)
    draft = plan.answers.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        for start in range(0, count, 4096):
            prompts = source.prompts("train", min(4096, count - start), start)
            planned = plan_step(start, prompts, samples=1, max_new_tokens=settings.max_new_tokens, temperature=1.0).rows
            for row in rollout(model.lm, tokenizer, planned, spec):
                line = {"prompt": row.prompt.text, "answer": row.text, "tokens": row.length}
                file.write(json.dumps(line) + "\n")
            say(f"{plan.experiment.answers_of} has answered {start + len(prompts)} of {count} training prompts")
    draft.rename(plan.answers)
    source.close()
