"""Builds the parts of a run from a recipe, and checks them before the first step.

`student.job.preparation` builds the parts that need no weights; `build_job` adds the student, the scorers, the learner
and what samples (`student.job.sampling`). The loop (`student.job.loop`) drives what it returns.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from google.protobuf.json_format import MessageToDict
from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.fleet.membership.outage import OutageHooks
from opd.wire.v1 import teacher_pb2 as pb
from student.data.hooks import ModelHook
from student.data.needs import merge
from student.data.plan import PromptCursor
from student.job.evaluate import EvalMeasure
from student.job.evaluator import Evaluator
from student.job.plugins import build_measure
from student.job.preparation import Prepared, prepare
from student.job.sampling import engine_setup, open_ahead, open_sampler
from student.job.scorers import Scorers
from student.job.services import LoopServices, ReadingServices
from student.job.stop_check import StopCheck
from student.learning.learner import Learner
from student.learning.objective import Objective
from student.methods.served_average import ServedAverage
from student.model.meeting import join
from student.model.model import Student, load_student
from student.model.rank_watch import RankWatch
from student.model.ranks import Ranks, make_accelerator
from student.model.sharding import shard
from student.plugin.controllers import Controller, Workbench
from student.rollout.ahead import Ahead, copy_of
from student.rollout.mismatch import Mismatch
from student.rollout.policy_sampler import PolicySampler
from student.run.space import Space
from student.scoring.local import LocalModels
from student.scoring.score import Scoring
from student.scoring.verify import Verification
from student.settings.recipe import Recipe
from student.settings.teachers import EmaSettings


@dataclass(frozen=True, slots=True)
class Job(Prepared):
    """The parts of a run: those that need no weights, and these; each is documented at its class.

    `controllers` are those of the recipe and, last, what follows them.
    """

    accelerator: Accelerator
    watch: RankWatch
    learner: Learner
    cursor: PromptCursor
    sampler: PolicySampler
    ahead: Ahead | None
    mismatch: Mismatch
    scorer: Scoring
    local: LocalModels
    controllers: list[Controller]
    services: LoopServices
    stop_check: StopCheck | None


def build_job(
    recipe: Recipe,
    stack: ExitStack,
    *,
    model_path: str | None = None,
    poll: Callable[[], None],
    watch: RankWatch | None = None,
    hooks: OutageHooks | None = None,
    space: Space | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Job:
    """Build the job in the order that fails fastest: plug-ins, prompts, fleet, handshake, model.

    Args:
        recipe: the recipe.
        stack: takes callbacks that close what the job opens.
        model_path: weights to load in place of the recipe's, for a resumed run: a model, an adapter or BASE+ADAPTER.
        poll: called repeatedly while waiting for the fleet, also for its first answer; may raise to give up.
        watch: of the ranks, if they have met; None to meet first.
        hooks: called while the loop waits for a teacher that is away; None for nothing.
        space: waits if a disk that the rollout engine writes to is full; None to end the run.
        log: called with a line of progress from time to time while an evaluation runs.
    """
    watch = watch or join(recipe.train.rank_patience, stack)
    prepared = prepare(recipe, stack, model_path, poll)
    accelerator = _accelerator(recipe, stack)
    ranks = Ranks(accelerator)
    student, twin = _student(prepared, accelerator, stack)
    scorers = _scorers(prepared, student, accelerator, ranks, stack, poll)
    scorer, local = scorers.objective(hooks), scorers.local
    learner = _learner(prepared, student, accelerator, ranks, scorer)
    measured = _measured(prepared, scorers, hooks)
    setup = engine_setup(prepared, learner, _candidates(prepared, measured), space)
    sampler = open_sampler(prepared, setup, learner, stack)
    ahead = open_ahead(prepared, setup, sampler, learner, scorer, local, twin, stack)
    bench = Workbench(learner, sampler, scorer, poll, stack.callback)
    costs = scorers.services.costs
    evaluator = Evaluator(recipe, bench, prepared.tokenizer, scorers.verification, measured, costs, log)
    cursor = PromptCursor(prepared.source)
    services = LoopServices(
        bench,
        scorers.objective,
        reading=scorers.services,
        evaluator=evaluator,
        local=local,
        cursor=cursor,
        seed=recipe.seed,
    )
    return Job(
        **{field.name: getattr(prepared, field.name) for field in fields(Prepared)},
        accelerator=accelerator,
        watch=watch,
        learner=learner,
        cursor=cursor,
        sampler=sampler,
        ahead=ahead,
        mismatch=Mismatch(prepared.plugins.engine.settings, local, ranks, accelerator.autocast, costs),
        scorer=scorer,
        local=local,
        controllers=[*prepared.plugins.controllers, *_followers(prepared, local, learner, poll)],
        services=services,
        stop_check=_stop_check(prepared, sampler, scorers),
    )


def _measured(prepared: Prepared, scorers: Scorers, hooks: OutageHooks | None) -> tuple[EvalMeasure, Scoring] | None:
    """The measure of evaluations, and a scorer of its own: it may need other payloads than the objective."""
    measure = build_measure(prepared.models, prepared.plugins.needs, prepared.recipe.teachers)
    if measure is None:
        return None
    return measure, scorers.make(merge([measure.needs()], temperature=prepared.recipe.rollout.temperature), hooks=hooks)


def _candidates(prepared: Prepared, measured: tuple[EvalMeasure, Scoring] | None) -> int:
    """How many candidates a rollout keeps, once for both: as many as the objective or the measure needs."""
    return max(prepared.plugins.needs.candidates, 0 if measured is None else measured[1].needs.candidates)


def _followers(prepared: Prepared, local: LocalModels, learner: Learner, poll: Callable[[], None]) -> list[Controller]:
    """The controller that sends the student's average to a served teacher: last, as methods may change the average."""
    recipe = prepared.recipe
    if prepared.fleet is None or recipe.teachers is None or recipe.teachers.ema.served is None:
        return []
    return [ServedAverage(recipe, prepared.fleet, local, learner.student, prepared.tokenizer, learner.ranks, poll)]


def _stop_check(prepared: Prepared, sampler: PolicySampler, scorers: Scorers) -> StopCheck | None:
    """The check of stop tokens before the first step; None without a live teacher to ask (recorded scores are not)."""
    live = prepared.fleet is not None and not prepared.fleet.recorded and prepared.plugins.needs.teacher
    if not live or not prepared.models.infos:
        return None
    return StopCheck(prepared.recipe, sampler, prepared.source, prepared.models.alike, prepared.stop_ids, scorers.make)


def _scorers(
    prepared: Prepared,
    student: Student,
    accelerator: Accelerator,
    ranks: Ranks,
    stack: ExitStack,
    poll: Callable[[], None],
) -> Scorers:
    recipe = prepared.recipe
    verification = Verification(prepared.source, recipe.rollout.verify_workers)
    stack.callback(verification.close)
    local = LocalModels(
        student,
        ranks,
        recipe.train,
        recipe.teachers.ema if recipe.teachers is not None else EmaSettings(),
        accelerator.device,
        valid_vocab=len(prepared.tokenizer),
        temperature=recipe.rollout.temperature,
    )
    reading = ReadingServices(local, verification, prepared.tokenizer, poll)
    return Scorers(prepared, verification, local, accelerator.device, reading)


def _student(prepared: Prepared, accelerator: Accelerator, stack: ExitStack) -> tuple[Student, PreTrainedModel | None]:
    """The student, and an unsharded copy that samples ahead if the student is sharded and the engine has no weights."""
    recipe, weights = prepared.recipe, prepared.weights
    student = load_student(
        weights.base,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        dropout=recipe.model.dropout,
        revision=weights.revision,
        lora=recipe.model.lora,
        adapter=weights.adapter,
    )
    twin = None
    if recipe.train.sharding == "fsdp":
        if recipe.train.max_staleness and not prepared.plugins.engine.traits.holds_weights:
            twin = copy_of(student.lm)
        stack.callback(shard(student, accelerator.device, half=accelerator.mixed_precision == "bf16"))
    student.hooks = [controller for controller in prepared.plugins.controllers if isinstance(controller, ModelHook)]
    return student, twin


def _learner(prepared: Prepared, student: Student, accelerator: Accelerator, ranks: Ranks, scorer: Scoring) -> Learner:
    recipe = prepared.recipe
    objective = Objective(prepared.plugins.terms, recipe.rollout.max_new_tokens)
    objective.bind(prepared.tokenizer)
    return Learner(
        student,
        objective,
        prepared.plugins.needs,
        recipe.train,
        accelerator,
        valid_vocab=len(prepared.tokenizer),
        temperature=recipe.rollout.temperature,
        head_of=scorer.head_of,
        ranks=ranks,
        shortest_first=prepared.learns_early,
    )


def _accelerator(recipe: Recipe, stack: ExitStack) -> Accelerator:
    """The accelerator, which knows device, precision and ranks.

    Raises:
        ConfigError: if there are more ranks than prompts in a step.
    """
    patience = recipe.train.disk_patience
    if recipe.teachers is not None:
        patience = max(patience, recipe.teachers.fleet.outage.budget_seconds)
    mixed = recipe.train.mixed_precision
    if mixed == "auto":
        mixed = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    accelerator = make_accelerator(mixed, patience)
    # accelerate keeps the precision per process and would refuse a second job with another precision.
    stack.callback(AcceleratorState._reset_state)
    if recipe.rollout.prompts_per_step < accelerator.num_processes:
        raise ConfigError(
            f"rollout.prompts_per_step is {recipe.rollout.prompts_per_step}, but each of {accelerator.num_processes} "
            "ranks needs a prompt; raise it or start fewer ranks."
        )
    return accelerator


def devices(accelerator: Accelerator) -> str:
    """What the run computes on, for people: the device of rank 0, and how many ranks have one like it."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {os.cpu_count()} cores"
    return name if accelerator.num_processes == 1 else f"{accelerator.num_processes} x {name}"


def fleet_fingerprints(infos: dict[str, pb.TeacherInfo]) -> dict[str, Any]:
    """The description that each served model gave in the handshake, as JSON values, for the run folder."""
    return {name: MessageToDict(info, preserving_proto_field_name=True) for name, info in infos.items()}
