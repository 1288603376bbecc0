"""Writes a teacher's answers to training prompts, once per world, for arms that learn from a file."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from opd.files import write_whole
from opd.tasks.build import build_prompts
from opd.tasks.modes import asked_content
from opd.tasks.prompt import Prompt
from opd_lab.experiment import ROUTED, Arm, Replicate
from opd_lab.plan import ExperimentPlan
from student.commands.answers import AnswerReport, check_how, write_answers
from student.settings.recipe import Recipe

DRAWS = {"verified": 4, "best": 4}


def write_all(
    plan: ExperimentPlan, world: int, arms: Iterable[Arm], log: Callable[[str], None] = lambda line: None
) -> None:
    """Write the files of answers that `arms` need and that do not exist yet.

    Each file has answers to the prompts that any run of the experiment in this world trains on.
    """
    if plan.experiment.answers_of is None:
        return
    for how in plan.answer_kinds(arms):
        if not plan.answers(world, how).is_file():
            torch.set_num_threads(1)
            log(_answer(plan, world, how))


def _answer(plan: ExperimentPlan, world: int, how: str) -> str:
    """Write one file and return a line about it for the user."""
    author, out = str(plan.experiment.answers_of), plan.answers(world, how)
    data = plan.recipe(Arm("answers", ""), Replicate(world, world), 1e-3)
    recipe = Recipe.model_validate({"run": "unused", **data})
    source = build_prompts(recipe.prompts, seed=world, modes=recipe.modes)
    prompts = list(training_prompts(plan, recipe, world).values())
    # The models of the short form are hardly trained and never answer correctly, so `verified` would find no answer.
    way = check_how("best" if how == "verified" and plan.form == "quick" else how)

    def write(asked: Sequence[Prompt], name: str, file: Path) -> AnswerReport:
        model = str(plan.models[world].model(name).path)
        return write_answers(recipe, source, asked, model, file, how=way, draws=DRAWS.get(how, 1))

    if author != ROUTED:
        found = [write(prompts, author, out)]
    else:
        routes = plan.experiment.routes
        parts = {domain: out.with_suffix(f".{domain}.jsonl") for domain in routes}
        found = [
            write([prompt for prompt in prompts if prompt.domain == domain], routes[domain], part)
            for domain, part in parts.items()
        ]
        _join(list(parts.values()), out)
    answered, asked = sum(part.answered for part in found), sum(part.prompts for part in found)
    return f"{author} of world {world} answered {answered} of {asked} prompts, {how}"


def _join(parts: Sequence[Path], out: Path) -> None:
    """Join the files of several authors, and their reports, into one."""
    reports = [json.loads(part.with_suffix(".report.json").read_text(encoding="utf-8")) for part in parts]
    sums = {name: sum(report[name] for report in reports) for name in ("prompts", "answered", "tokens", "drawn")}
    write_whole(out.with_suffix(".report.json"), json.dumps(sums, indent=1) + "\n")
    write_whole(out, "".join(part.read_text(encoding="utf-8") for part in parts))


def training_prompts(plan: ExperimentPlan, recipe: Recipe, world: int) -> dict[int, Prompt]:
    """The distinct training prompts of all runs in a world, by the hash of what they ask (`asked_content`)."""
    count = recipe.train.steps * recipe.rollout.prompts_per_step
    found: dict[int, Prompt] = {}
    seeds = {r.seed for r in (*plan.replicates, plan.tuning_replicate) if r.world == world}
    for seed in sorted(seeds):
        source = build_prompts(recipe.prompts, seed=seed, modes=recipe.modes)
        found |= {asked_content(prompt): prompt for prompt in source.prompts("train", count)}
        source.close()
    return found


def drawn_share(plan: ExperimentPlan, world: int, how: str) -> float:
    """Number of tokens that the teacher drew per token in its file of answers; 1 if it kept all draws."""
    data: dict[str, Any] = json.loads(plan.answers(world, how).with_suffix(".report.json").read_text(encoding="utf-8"))
    return float(data["drawn"]) / max(1, int(data["tokens"]))
