"""Answers of a teacher to training prompts, written once per experiment for arms that learn from a file.

Each line: {"prompt": ..., "answer": ..., "tokens": ...}; sampled at temperature 1 in a fixed random stream.
"""

import json
from collections.abc import Callable

import torch

from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.lab.experiment import TUNING_SEED, Arm
from student.lab.plan import Plan
from student.learning.model import load_student
from student.recipe import Recipe
from student.rollout.transformers import RolloutSpec, rollout


def write_answers(plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
    """Write `plan.answers` unless it is there: one answer for each distinct prompt that any run trains on."""
    if plan.answers.is_file() or plan.experiment.answers_of is None:
        return
    torch.set_num_threads(1)
    recipe = Recipe.model_validate({"run": "unused", **plan.recipe(Arm("answers", ""), 0, 1e-3)})
    settings = recipe.rollout
    prompts = list(training_prompts(plan, recipe).values())
    path = str(plan.cast.model(plan.experiment.answers_of).path)
    model, tokenizer = load_student(path, dtype="float32", attention=None, gradient_checkpointing=False)
    spec = RolloutSpec(0, 256, 0, len(tokenizer), settings.max_prompt_tokens)
    plan.folder.mkdir(parents=True, exist_ok=True)
    draft = plan.answers.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        for start in range(0, len(prompts), 2048):
            part = prompts[start : start + 2048]
            planned = plan_step(0, part, samples=1, max_new_tokens=settings.max_new_tokens, temperature=1.0).rows
            for row in rollout(model.lm, tokenizer, planned, spec, purpose=("answers",)):
                line = {"prompt": row.prompt.text, "answer": row.text, "tokens": row.length}
                file.write(json.dumps(line) + "\n")
            say(f"{plan.experiment.answers_of} has answered {start + len(part)} of {len(prompts)} training prompts")
    draft.rename(plan.answers)


def training_prompts(plan: Plan, recipe: Recipe) -> dict[int, Prompt]:
    """The distinct training prompts of all seeds of an experiment, by content."""
    count = recipe.train.steps * recipe.rollout.prompts_per_step
    found: dict[int, Prompt] = {}
    for seed in (*plan.seeds, TUNING_SEED):
        source = build_prompts(recipe.prompts, seed=seed)
        found |= {prompt.content_hash: prompt for prompt in source.prompts("train", count)}
        source.close()
    return found
