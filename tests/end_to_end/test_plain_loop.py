"""With one update per batch the loop is the plain one, bit for bit: sample, score, loss, backward, clip, AdamW."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import metrics_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.fleet.client import TeacherFleet
from opd.tasks import build_prompts
from opd.wire.types import PayloadKind
from student.data.batch import collate, signal_tokens, split
from student.data.needs import TEACHER, Needs, merge
from student.data.outcome import gather_outcomes
from student.data.plan import plan_step
from student.data.row import Row
from student.data.schedule import learning_rate
from student.data.token_batch import TokenBatch
from student.job.session import train
from student.learning.objective import Objective
from student.model.model import ProjectionSpec, Student, load_tokenizer, project
from student.plugin.terms import build_terms
from student.rollout.requests import RolloutSpec
from student.rollout.transformers import rollout
from student.settings.recipe import Recipe

CPU = torch.device("cpu")


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def batch_of(student: Student, rows: list[Row], part: list[int], needs: Needs, spec: ProjectionSpec) -> TokenBatch:
    batch = collate(rows, part, CPU)
    hidden = student(batch.input_ids, batch.attention_mask, batch.row, batch.source)
    signals = {
        (need.role, need.spec.kind): signal_tokens(batch.rows, need.role, need.spec.kind, lambda role, row: None, CPU)  # type: ignore[arg-type, return-value]
        for need in needs.signals
    }
    return replace(
        batch,
        student=project(hidden, student.head(), batch, None, spec),
        signals=signals,
        valid_vocab=spec.valid_vocab,
        temperature=spec.temperature,
    )


def plain_loop(recipe: Recipe, fleet: TeacherFleet) -> dict[str, Tensor]:
    """The weights after `train.steps` plain steps: nothing of loop, learner, scorer, sampler or updates."""
    settings, draws = recipe.train, recipe.rollout
    tokenizer = load_tokenizer(recipe.model.path)
    student = Student(AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32))
    objective = Objective(build_terms(recipe.objective), draws.max_new_tokens)
    needs = merge([objective.needs()], temperature=draws.temperature)
    spec = RolloutSpec(recipe.seed, draws.batch_rows, needs.candidates, len(tokenizer), draws.max_prompt_tokens)
    projection = ProjectionSpec(needs.student, len(tokenizer), draws.temperature)
    matrices = [p for p in student.parameters() if p.ndim >= 2]
    others = [p for p in student.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=settings.betas,
    )
    source = build_prompts(recipe.prompts, seed=recipe.seed)
    for step in range(settings.steps):
        prompts = source.prompts("train", draws.prompts_per_step, step * draws.prompts_per_step)
        plan = plan_step(
            step,
            prompts,
            samples=draws.samples_per_prompt,
            max_new_tokens=draws.max_new_tokens,
            temperature=draws.temperature,
        )
        rows = rollout(student.lm, tokenizer, plan.rows, spec)
        for need in needs.signals:
            assert need.role == TEACHER
            items = [row.asked(gather=need.spec.kind is PayloadKind.GATHER)[0][0] for row in rows]
            for row, scores in zip(rows, fleet.score("teacher", items, need.spec, temperature=need.level), strict=True):
                row.signals[need.role, need.spec.kind] = scores
        for row in rows if needs.reward else ():
            row.verdict = source.verify(row.prompt, row.text)
        objective.assess(rows, *gather_outcomes(rows))
        objective.prepare(rows)
        weights = objective.position_weights(rows, CPU)
        ends = [0, *torch.tensor([row.length for row in rows]).cumsum(0).tolist()]
        # Of a divergence alone the shortest rows are learnt from first, while teachers score the others.
        parts = split(rows, settings.micro_batch_tokens, shortest_first=not needs.reward, turn=None)
        assert len(parts) > 1
        for part in parts:
            positions = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in part])
            batch = batch_of(student, rows, part, needs, projection)
            objective.loss(batch, [weight[positions] for weight in weights])[0].backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step,
                peak=settings.learning_rate,
                warmup=settings.warmup_steps,
                total=settings.steps,
                schedule=settings.schedule,
            )
        optimizer.step()
        optimizer.zero_grad()
    source.close()
    return dict(student.lm.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"objective": [{"name": "opd", "payload": "gather", "k": 8}]}, id="distillation"),
        pytest.param(
            {
                "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
                "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
                "objective": [{"name": "grpo"}],
            },
            id="reinforcement",
        ),
    ],
)
def test_one_update_per_batch_gives_the_weights_of_the_plain_loop(
    make_recipe: Callable[..., Recipe], world: Path, teacher: Any, changes: dict[str, Any]
) -> None:
    # Several micro-batches and a clip that acts: their sums and the scaled gradient must agree too.
    few = {"steps": 3, "epochs": 1, "minibatches": 1, "checkpoint_every": 0}
    small = {"micro_batch_tokens": 64, "max_grad_norm": 0.05}
    recipe = make_recipe(**changes, train={**few, **small}, eval={"prompts": 0})
    checkpoint = Path(train(recipe)["checkpoint"])
    with TeacherFleet.connect([teacher.address]) as fleet:
        plain = plain_loop(recipe, fleet)
    assert all(line["grad_clipped"] == 1.0 for line in metrics_of(recipe.run))
    kept = load_file(checkpoint / "model/model.safetensors")
    assert digests({name: plain[name] for name in kept}) == digests(kept)
    first = load_file(world / "student/model.safetensors")
    assert digests(first) != digests(kept)
