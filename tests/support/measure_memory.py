"""Peak memory of a student's rollout and learning: python measure_memory.py RECIPE.yaml SMALL_MODEL.

Prints bytes above what the process had after the same with the small model.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rows import make_row
from transformers import AutoTokenizer

from opd.config import load_settings
from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.data.row import Row
from student.job.plugins import build_plugins
from student.learning.learner import Learner
from student.learning.objective import Objective
from student.model.model import Student, load_student
from student.model.sharding import shard, whole
from student.rollout.requests import RolloutSpec
from student.rollout.transformers import rollout
from student.settings.recipe import Recipe

M_MMAP_THRESHOLD = -3
"""malloc.h's name for the size above which memory is mapped for itself."""


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident() -> int:
    """Most bytes of this process in memory so far; getrusage would count those of the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def rows(recipe: Recipe, vocabulary: int) -> list[Row]:
    """Two micro-batches of the longest rows."""
    prompt, length = recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens
    count = 2 * max(1, recipe.train.micro_batch_tokens // (prompt + length))
    generator = np.random.default_rng(0)
    return [
        make_row(
            generator.integers(0, vocabulary, length),
            prompt=str(i),
            behaviour=-1.0,
            prompt_ids=generator.integers(0, vocabulary, prompt).astype(np.uint32),
            origin="expert",
        )
        for i in range(count)
    ]


def sample(recipe: Recipe, student: Student) -> None:
    """As many rows as run together, of the longest prompts, for a few tokens."""
    settings = recipe.rollout
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    spec = RolloutSpec(
        0, settings.batch_rows, 0, student.lm.config.vocab_size, settings.max_prompt_tokens + 1, frozenset({-1})
    )
    prompts = [Prompt.make("1" * (settings.max_prompt_tokens - 1))]
    plan = plan_step(0, prompts, samples=settings.batch_rows, max_new_tokens=settings.max_new_tokens, temperature=1.0)
    with whole(student):
        rollout(student.lm, tokenizer, plan.rows, spec)


def work(recipe: Recipe) -> None:
    """Sample, then learn twice: the second time moments are there while gradients are made."""
    plugins = build_plugins(recipe)
    student = load_student(
        recipe.model.path,
        dtype=recipe.model.dtype,
        attention=None,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        lora=recipe.model.lora,
    )
    if recipe.train.sharding == "fsdp":
        shard(student, torch.device("cpu"), half=False)
    vocabulary = student.lm.config.vocab_size
    learner = Learner(
        student,
        Objective(plugins.terms, recipe.rollout.max_new_tokens),
        plugins.needs,
        recipe.train,
        Accelerator(cpu=True),
        valid_vocab=vocabulary,
        temperature=1.0,
        head_of=lambda role, row: student.head(),
    )
    if recipe.rollout.batch_rows > 1:
        sample(recipe, student)
    for step in range(2):
        learner.update(rows(recipe, vocabulary), step)


def main() -> None:
    """First with the small model, so that libraries are loaded, then what is measured."""
    torch.set_num_threads(1)
    # So that the tensors that are freed leave the process, and what is measured are those that are needed at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    recipe, small = load_settings(Recipe, Path(sys.argv[1]), ()), sys.argv[2]
    work(
        recipe.model_copy(
            update={
                "model": recipe.model.model_copy(update={"path": small}),
                "train": recipe.train.model_copy(update={"micro_batch_tokens": 1}),
                "rollout": recipe.rollout.model_copy(update={"max_prompt_tokens": 8, "max_new_tokens": 4}),
            }
        )
    )
    gc.collect()
    before = resident()
    work(recipe)
    print(most_resident() - before)


if __name__ == "__main__":
    main()
