"""A job: everything a run needs, built and checked from a recipe before the first step."""

import copy
import os
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from google.protobuf.json_format import MessageToDict

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.fleet.source import ScoreSource
from opd.tasks.build import build_prompts
from opd.tasks.source import PromptSource
from opd.tasks.stops import generation_stops, stop_set
from opd.wire.v1 import teacher_pb2 as pb
from student.controllers import Controller, Workbench
from student.data.cursor import PromptCursor
from student.data.prompts import fit_prompts
from student.learning.learner import Learner
from student.learning.model import Student, Weights, load_student, load_tokenizer
from student.learning.objective import Objective
from student.learning.rank_watch import RankWatch
from student.learning.ranks import Ranks, launched_ranks, make_accelerator
from student.learning.sharding import shard
from student.plugins import Plugins, build_measure, build_plugins
from student.recipe import EmaSettings, Recipe
from student.rl.rewards.chain import RewardChain
from student.rl.rewards.rounds import StepRewards
from student.rollout.ahead import Ahead, copy_of
from student.rollout.engine import CopyEngine, EngineSetup, OnRow, PolicySampler, RolloutEngine, RolloutEngineSettings
from student.rollout.episodes import EpisodePlayer
from student.rollout.mismatch import Mismatch
from student.rollout.spec import RolloutSpec
from student.rollout.strategy import Strategy
from student.scoring.contexts import Contexts
from student.scoring.handshake import Scoring, shake_hands
from student.scoring.local import LocalModels
from student.scoring.needs import Needs, merge
from student.scoring.prompt_check import check_contexts, check_prompts
from student.scoring.score import Scorer
from student.scoring.stop_check import StopCheck
from student.scoring.stops import StopMap, map_of
from student.scoring.verify import Verification
from student.services import LoopServices


@dataclass(slots=True)
class Job:
    """The parts of a run; see the classes for what each does."""

    recipe: Recipe
    accelerator: Accelerator
    watch: RankWatch
    fleet: ScoreSource | None
    models: Scoring
    source: PromptSource
    tokenizer: Any
    learner: Learner
    cursor: PromptCursor
    strategy: Strategy
    sampler: PolicySampler
    ahead: Ahead | None
    mismatch: Mismatch
    scorer: Scorer
    local: LocalModels
    controllers: list[Controller]
    rewards: RewardChain
    services: LoopServices
    stop_check: StopCheck | None
    remarks: list[str]


def connect(recipe: Recipe) -> ScoreSource | None:
    """The fleet of the recipe; None when it names no endpoints.

    Raises:
        UnavailableError: when no server answers within teachers.fleet.connect_seconds.
    """
    if recipe.teachers is None or not recipe.teachers.endpoints:
        return None
    ranks, fleet = launched_ranks(), recipe.teachers.fleet
    # The ranks of a run ask the same servers: together they have in flight what one would have.
    tokens = max(1, fleet.calls.in_flight_tokens // ranks)
    settings = fleet.model_copy(update={"calls": fleet.calls.model_copy(update={"in_flight_tokens": tokens})})
    source = TeacherFleet.connect(recipe.teachers.endpoints, settings=settings, client=_client_name(recipe.run, ranks))
    # The run must fit all replicas, and a row that finds no second one is not compared.
    source.settle()
    return source


def _client_name(run: Path, ranks: int) -> str:
    """How servers know this process, for fair queueing and logs: by the run's folder and, of several ranks, its own."""
    rank = f".{os.environ.get('RANK', '0')}" if ranks > 1 else ""
    return re.sub(r"[^A-Za-z0-9._-]", "-", run.name or "student")[: 64 - len(rank)] + rank


def build_job(recipe: Recipe, stack: ExitStack, *, model_path: str | None = None, poll: Callable[[], None]) -> Job:
    """Build the job in the order that fails fastest: plug-ins, prompts, fleet, handshake, model.

    Args:
        recipe: the recipe.
        stack: closes what the job opened.
        model_path: weights to load instead of the recipe's, for a resumed run: a model, an adapter or BASE+ADAPTER.
        poll: called while waiting for the fleet.
    """
    _set_up_torch(recipe)
    plugins = build_plugins(recipe)
    stack.callback(plugins.rewards.close)
    weights = Weights.of(recipe.model, model_path)
    path, revision = weights.base, weights.revision
    tokenizer = load_tokenizer(path, revision)
    source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
    stack.callback(source.close)
    fit_prompts(recipe, source, tokenizer)
    check_prompts(recipe, plugins.needs, source)
    fleet = connect(recipe) if plugins.needs.served else None
    if fleet is not None:
        stack.callback(fleet.close)
    models = shake_hands(fleet, recipe, plugins.needs, tokenizer, source)
    stop_ids = stop_set(tokenizer, generation_stops(path, revision), recipe.rollout.stop_tokens).ids
    stops = map_of(recipe, stop_ids, models.infos, plugins.needs)
    contexts = Contexts(recipe.contexts, tokenizer, recipe.rollout.max_prompt_tokens)
    check_contexts(recipe, contexts, source, tokenizer)
    accelerator = _accelerator(recipe, stack)
    watch = RankWatch(Ranks(accelerator))
    stack.push(watch.leave)
    student = _student(recipe, weights, accelerator, stack)
    verification = Verification(source, recipe.rollout.verify_workers)
    stack.callback(verification.close)
    local = _local_models(recipe, student, accelerator, len(tokenizer))
    scorers = _Scorers(recipe, fleet, verification, accelerator.device, models.infos, local, contexts, stops, plugins)
    scorer = scorers.make(plugins.needs)
    learner = _learner(recipe, plugins, student, accelerator, tokenizer, scorer)
    measure = build_measure(models.infos, plugins.needs, recipe.teachers)
    kl_needs = merge([] if measure is None else [measure.needs()], temperature=recipe.rollout.temperature)
    candidates = max(plugins.needs.candidates, kl_needs.candidates)
    spec = _rollout_spec(recipe, plugins.needs, accelerator, candidates, len(tokenizer), stop_ids, stops)
    setup = EngineSetup(student.lm, tokenizer, spec, path, revision)
    sampler = _sampler(recipe, plugins, setup, learner, stack)
    ahead = _ahead(recipe, plugins, setup, sampler, learner, scorer.submit, stack)
    cursor = PromptCursor(source)
    services = LoopServices(
        recipe,
        learner,
        tokenizer,
        source,
        scorer,
        sampler,
        None if measure is None else (measure, scorers.make(kl_needs)),
        poll,
        lambda: Workbench(learner, sampler, scorers.make(plugins.needs), poll, stack.callback),
        local,
        cursor,
        verification,
    )
    scorers.services = services
    live = fleet is not None and not fleet.recorded and plugins.needs.teacher and models.infos
    return Job(
        recipe=recipe,
        accelerator=accelerator,
        watch=watch,
        fleet=fleet,
        models=models,
        source=source,
        tokenizer=tokenizer,
        learner=learner,
        cursor=cursor,
        strategy=plugins.strategy,
        sampler=sampler,
        ahead=ahead,
        mismatch=Mismatch(plugins.engine.settings, local, learner.ranks, accelerator.autocast, services.costs),
        scorer=scorer,
        local=local,
        controllers=plugins.controllers,
        rewards=plugins.rewards,
        services=services,
        stop_check=StopCheck(recipe, sampler, source, models.infos, stop_ids, scorers.make) if live else None,
        remarks=plugins.remarks,
    )


@dataclass(slots=True)
class _Scorers:
    """Makes scorers: each keeps requests of its own, all share what answers them.

    Attributes:
        services: for rewards; known once all parts are there.
    """

    recipe: Recipe
    fleet: ScoreSource | None
    verification: Verification
    device: torch.device
    infos: dict[str, pb.TeacherInfo]
    local: LocalModels
    contexts: Contexts
    stops: StopMap
    plugins: Plugins
    services: LoopServices | None = None

    def make(self, needs: Needs, stops: StopMap | None = None) -> Scorer:
        """A scorer for `needs`, with another map of stop tokens where one is given."""
        return Scorer(
            self.fleet,
            self.recipe.teachers,
            needs,
            self.verification,
            self.device,
            known=self.infos,
            local=self.local,
            contexts=self.contexts,
            stops=self.stops if stops is None else stops,
            rewards=self._rewards,
        )

    def _rewards(self) -> StepRewards:
        if self.services is None:
            raise TypeError("rows were scored before the job was built")
        return StepRewards(self.plugins.rewards, self.services)


def _student(recipe: Recipe, weights: Weights, accelerator: Accelerator, stack: ExitStack) -> Student:
    student = load_student(
        weights.base,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        revision=weights.revision,
        lora=recipe.model.lora,
        adapter=weights.adapter,
    )
    if recipe.train.sharding == "fsdp":
        stack.callback(shard(student, accelerator.device, half=accelerator.mixed_precision == "bf16"))
    return student


def _learner(
    recipe: Recipe, plugins: Plugins, student: Student, accelerator: Accelerator, tokenizer: Any, scorer: Scorer
) -> Learner:
    objective = Objective(plugins.terms, recipe.rollout.max_new_tokens)
    objective.bind(tokenizer)
    return Learner(
        student,
        objective,
        plugins.needs,
        recipe.train,
        accelerator,
        valid_vocab=len(tokenizer),
        temperature=recipe.rollout.temperature,
        head_of=scorer.head_of,
    )


def _rollout_spec(
    recipe: Recipe,
    needs: Needs,
    accelerator: Accelerator,
    candidates: int,
    vocabulary: int,
    stop_ids: Collection[int],
    stops: StopMap,
) -> RolloutSpec:
    return RolloutSpec(
        seed=recipe.seed,
        batch_rows=recipe.rollout.batch_rows,
        candidates=min(candidates, vocabulary),
        valid_vocab=vocabulary,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        stop_ids=frozenset(stop_ids),
        cache_tokens=recipe.rollout.cache_tokens,
        autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        keep_ids=stops.ids if candidates > len(stops.ids) else (),
        read_given=bool(needs.signals or needs.reward or candidates),
    )


def _sampler(recipe: Recipe, plugins: Plugins, setup: EngineSetup, learner: Learner, stack: ExitStack) -> PolicySampler:
    plugins.engine.open(setup)
    stack.callback(plugins.engine.close)
    player = EpisodePlayer(recipe.rollout.episodes, setup.tokenizer, setup.spec)
    stack.callback(player.close)
    return PolicySampler(plugins.engine, learner, player)


def _ahead(
    recipe: Recipe,
    plugins: Plugins,
    setup: EngineSetup,
    sampler: PolicySampler,
    learner: Learner,
    on_row: OnRow,
    stack: ExitStack,
) -> Ahead | None:
    """What samples while the loop trains, with an engine on a copy of the student where the run's holds no weights."""
    if not recipe.train.max_staleness:
        return None
    tokenizer = copy.deepcopy(setup.tokenizer)  # a fast one may not be used by two threads at once
    own: RolloutEngine | None = None
    if not plugins.engine.holds_weights:
        own = CopyEngine(RolloutEngineSettings(name="copy"))
        own.open(replace(setup, model=copy_of(setup.model), tokenizer=tokenizer))

    def lend() -> AbstractContextManager[RolloutEngine]:
        return sampler.lend() if own is None else nullcontext(own)

    player = EpisodePlayer(recipe.rollout.episodes, tokenizer, setup.spec)
    stack.callback(player.close)
    ahead = Ahead(recipe.train.max_staleness, recipe.train.steps, learner, lend, player, on_row)
    stack.callback(ahead.close)
    return ahead


def _local_models(recipe: Recipe, student: Student, accelerator: Accelerator, valid_vocab: int) -> LocalModels:
    return LocalModels(
        student,
        Ranks(accelerator),
        recipe.train,
        recipe.teachers.ema if recipe.teachers is not None else EmaSettings(),
        accelerator.device,
        valid_vocab=valid_vocab,
        temperature=recipe.rollout.temperature,
    )


def _set_up_torch(recipe: Recipe) -> None:
    """Threads, seed and silence of this process."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    torch.manual_seed(recipe.seed)


def _accelerator(recipe: Recipe, stack: ExitStack) -> Accelerator:
    """Device, precision and ranks.

    Raises:
        ConfigError: when there are more ranks than prompts in a step.
    """
    patience = recipe.teachers.fleet.outage.budget_seconds if recipe.teachers is not None else 0.0
    mixed = recipe.train.mixed_precision
    if mixed == "auto":
        mixed = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    accelerator = make_accelerator(mixed, patience)
    # accelerate keeps precision per process: without this a second job of another precision would be refused.
    stack.callback(AcceleratorState._reset_state)
    if recipe.rollout.prompts_per_step < accelerator.num_processes:
        raise ConfigError(
            f"rollout.prompts_per_step is {recipe.rollout.prompts_per_step}, but each of {accelerator.num_processes} "
            "ranks needs a prompt; raise it or start fewer ranks."
        )
    return accelerator


def fleet_fingerprints(infos: dict[str, pb.TeacherInfo]) -> dict[str, Any]:
    """What identifies the served models, for the run folder."""
    return {name: MessageToDict(info, preserving_proto_field_name=True) for name, info in infos.items()}
