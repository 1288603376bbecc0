"""Builds the parts of a run from a recipe, and checks them before the first step.

`student.preparation` builds the parts that need no weights; `build_job` adds the student, the scorers, the learner and
the sampler. The loop (`student.loop`) drives what it returns.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from google.protobuf.json_format import MessageToDict
from torch import Tensor
from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.fleet.source import ScoreSource
from opd.tasks.source import PromptSource
from opd.wire.v1 import teacher_pb2 as pb
from student.controllers import Controller, Workbench
from student.data.cursor import PromptCursor
from student.learning.early import learns_early
from student.learning.learner import Learner
from student.learning.model import Student, load_student
from student.learning.objective import Objective
from student.learning.rank_watch import RankWatch
from student.learning.ranks import Ranks, make_accelerator
from student.learning.sharding import shard
from student.plugins import Plugins, build_measure
from student.preparation import Prepared, prepare
from student.recipe import Recipe
from student.rl.rewards.chain import RewardChain
from student.rl.rewards.rounds import StepRewards
from student.rollout.ahead import Ahead, copy_of
from student.rollout.engine import (
    CopyEngine,
    EngineSetup,
    OnRow,
    PackedWeights,
    PolicySampler,
    RolloutEngine,
    RolloutEngineSettings,
    Shards,
)
from student.rollout.episodes import EpisodePlayer
from student.rollout.gate import Gate
from student.rollout.mismatch import Mismatch
from student.rollout.spec import RolloutSpec
from student.rollout.strategy import Strategy
from student.run.served_average import ServedAverage
from student.scoring.ema import EmaSettings
from student.scoring.handshake import Scoring
from student.scoring.local import LocalModels
from student.scoring.needs import Needs, merge
from student.scoring.score import Scorer
from student.scoring.stop_check import StopCheck
from student.scoring.stops import StopMap
from student.scoring.verify import Verification
from student.services import LoopServices


@dataclass(slots=True)
class Job:
    """The parts of a run; each is documented at its class.

    `asks_ahead` says whether rows sampled ahead are sent to the models at once, or only verified because the strategy
    may still drop them; `learns_early`, whether the gradient of a step may begin before all its scores are there.
    """

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
    asks_ahead: bool
    learns_early: bool
    mismatch: Mismatch
    scorer: Scorer
    local: LocalModels
    controllers: list[Controller]
    rewards: RewardChain
    services: LoopServices
    stop_check: StopCheck | None
    remarks: list[str]


def build_job(recipe: Recipe, stack: ExitStack, *, model_path: str | None = None, poll: Callable[[], None]) -> Job:
    """Build the job in the order that fails fastest: plug-ins, prompts, fleet, handshake, model.

    Args:
        recipe: the recipe.
        stack: takes callbacks that close what the job opens.
        model_path: weights to load in place of the recipe's, for a resumed run: a model, an adapter or BASE+ADAPTER.
        poll: called repeatedly while waiting for the fleet; may raise to give up.
    """
    found = prepare(recipe, stack, model_path)
    plugins, tokenizer = found.plugins, found.tokenizer
    accelerator = _accelerator(recipe, stack)
    ranks = Ranks(accelerator)
    watch = RankWatch(ranks)
    stack.push(watch.leave)  # exits run in reverse order: other ranks hear that this one ends once its parts are closed
    student, twin = _student(recipe, found, accelerator, stack)
    student.hooks = [hook for controller in plugins.controllers for hook in controller.hooks()]
    scorers = _scorers(recipe, found, student, accelerator, ranks, stack)
    scorer, local = scorers.make(plugins.needs), scorers.local
    early = found.fleet is not None and learns_early(recipe, plugins)
    learner = _learner(recipe, plugins, student, accelerator, ranks, tokenizer, scorer, early=early)
    # Evaluations may need other payloads than the objective, and then have a scorer of their own. Candidates are kept
    # once, at the rollout, as many as the more demanding of the two needs.
    measure = build_measure(found.models.infos, plugins.needs, recipe.teachers)
    kl_needs = merge([] if measure is None else [measure.needs()], temperature=recipe.rollout.temperature)
    spec = _rollout_spec(recipe, found, accelerator, max(plugins.needs.candidates, kl_needs.candidates))
    shards = Shards(student, learner.ranks, str(recipe.run.absolute())) if learner.sharded else None
    setup = EngineSetup(student.lm, tokenizer, spec, found.weights.base, found.weights.revision, shards)
    sampler = _sampler(recipe, plugins, setup, learner, stack)
    asks_ahead = plugins.rewards.reads_signals or not plugins.strategy.judges
    # Rows that the strategy may still drop are only verified ahead; models score the rows that it keeps.
    on_row = scorer.submit if asks_ahead else scorer.verify
    ahead = _ahead(recipe, plugins, setup, sampler, learner, local, twin, on_row, scorer.flush, stack)
    cursor = PromptCursor(found.source)
    services = LoopServices(
        recipe,
        learner,
        tokenizer,
        found.source,
        scorer,
        sampler,
        None if measure is None else (measure, scorers.make(kl_needs)),
        poll,
        lambda: Workbench(learner, sampler, scorers.make(plugins.needs), poll, stack.callback),
        local,
        cursor,
        scorers.verification,
    )
    scorers.services = services  # set afterwards: rewards use the services, which hold a scorer
    return Job(
        recipe=recipe,
        accelerator=accelerator,
        watch=watch,
        fleet=found.fleet,
        models=found.models,
        source=found.source,
        tokenizer=tokenizer,
        learner=learner,
        cursor=cursor,
        strategy=plugins.strategy,
        sampler=sampler,
        ahead=ahead,
        asks_ahead=asks_ahead,
        learns_early=early,
        mismatch=Mismatch(plugins.engine.settings, local, learner.ranks, accelerator.autocast, services.costs),
        scorer=scorer,
        local=local,
        controllers=[*plugins.controllers, *_followers(recipe, found, local, learner, poll)],
        rewards=plugins.rewards,
        services=services,
        stop_check=_stop_check(recipe, found, sampler, scorers),
        remarks=plugins.remarks,
    )


def _followers(
    recipe: Recipe, found: Prepared, local: LocalModels, learner: Learner, poll: Callable[[], None]
) -> list[Controller]:
    """The controller that sends the student's average to a served teacher: last, as methods may change the average."""
    if found.fleet is None or recipe.teachers is None or recipe.teachers.ema.served is None:
        return []
    return [ServedAverage(recipe, found.fleet, local, learner.student, found.tokenizer, learner.ranks, poll)]


def _stop_check(recipe: Recipe, found: Prepared, sampler: PolicySampler, scorers: "_Scorers") -> StopCheck | None:
    """The check of stop tokens before the first step; None without a live teacher to ask (recorded scores are not)."""
    live = found.fleet is not None and not found.fleet.recorded and found.plugins.needs.teacher
    if not live or not found.models.infos:
        return None
    return StopCheck(recipe, sampler, found.source, found.models.infos, found.stop_ids, scorers.make)


@dataclass(slots=True)
class _Scorers:
    """Makes scorers, each with its own needs; all share the fleet, the local models and the verifiers.

    Attributes:
        services: passed to rewards; set once all parts are built.
    """

    recipe: Recipe
    found: Prepared
    verification: Verification
    device: torch.device
    local: LocalModels
    services: LoopServices | None = None

    def make(self, needs: Needs, stops: StopMap | None = None) -> Scorer:
        """A scorer for `needs`; `stops` replaces the run's own map of stop tokens."""
        return Scorer(
            self.found.fleet,
            self.recipe.teachers,
            needs,
            self.verification,
            self.device,
            known=self.found.models.infos,
            local=self.local,
            contexts=self.found.contexts,
            stops=self.found.stops if stops is None else stops,
            rewards=self._rewards,
        )

    def _rewards(self) -> StepRewards:
        if self.services is None:
            raise TypeError("rows were scored before the job was built")
        # Asked for rows that are not of the step, such as probes': metrics of the step must not count these.
        return StepRewards(self.found.plugins.rewards.aside(), self.services)


def _scorers(
    recipe: Recipe, found: Prepared, student: Student, accelerator: Accelerator, ranks: Ranks, stack: ExitStack
) -> _Scorers:
    verification = Verification(found.source, recipe.rollout.verify_workers)
    stack.callback(verification.close)
    local = _local_models(recipe, student, accelerator, ranks, len(found.tokenizer))
    return _Scorers(recipe, found, verification, accelerator.device, local)


def _student(
    recipe: Recipe, found: Prepared, accelerator: Accelerator, stack: ExitStack
) -> tuple[Student, PreTrainedModel | None]:
    """The student, and an unsharded copy that samples ahead if the student is sharded and the engine has no weights."""
    weights = found.weights
    student = load_student(
        weights.base,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        revision=weights.revision,
        lora=recipe.model.lora,
        adapter=weights.adapter,
    )
    twin = None
    if recipe.train.sharding == "fsdp":
        if recipe.train.max_staleness and not found.plugins.engine.holds_weights:
            twin = copy_of(student.lm)
        stack.callback(shard(student, accelerator.device, half=accelerator.mixed_precision == "bf16"))
    return student, twin


def _learner(
    recipe: Recipe,
    plugins: Plugins,
    student: Student,
    accelerator: Accelerator,
    ranks: Ranks,
    tokenizer: Any,
    scorer: Scorer,
    *,
    early: bool,
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
        ranks=ranks,
        shortest_first=early,
    )


def _rollout_spec(recipe: Recipe, found: Prepared, accelerator: Accelerator, candidates: int) -> RolloutSpec:
    needs, vocabulary, keep_ids = found.plugins.needs, len(found.tokenizer), found.stops.ids
    return RolloutSpec(
        seed=recipe.seed,
        batch_rows=recipe.rollout.batch_rows,
        candidates=min(candidates, vocabulary),
        valid_vocab=vocabulary,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        stop_ids=frozenset(found.stop_ids),
        cache_tokens=recipe.rollout.cache_tokens,
        autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        # `most_likely` must return more ids than it is made to keep; `map_of` has refused teachers asked at too few.
        keep_ids=keep_ids if candidates > len(keep_ids) else (),
        read_given=bool(needs.signals or needs.reward or candidates),
        experts=needs.experts,
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
    local: LocalModels,
    twin: PreTrainedModel | None,
    on_row: OnRow,
    on_end: Callable[[], None],
    stack: ExitStack,
) -> Ahead | None:
    """What samples ahead: the engine if it holds weights, or one on a copy; None if `train.max_staleness` is 0."""
    if not recipe.train.max_staleness:
        return None
    tokenizer = copy.deepcopy(setup.tokenizer)  # a fast tokenizer must not be used by two threads at once
    own: RolloutEngine | None = None
    if not plugins.engine.holds_weights:
        own = CopyEngine(RolloutEngineSettings(name="copy"))
        model = (twin or copy_of(setup.model)).to(learner.accelerator.device)
        own.open(replace(setup, model=model, tokenizer=tokenizer, shards=None))
    sampler.beside = own is None

    def lend() -> AbstractContextManager[RolloutEngine]:
        return sampler.lend() if own is None else nullcontext(own)

    player = EpisodePlayer(recipe.rollout.episodes, tokenizer, setup.spec)
    stack.callback(player.close)

    def pack(weights: Mapping[str, Tensor], version: int) -> PackedWeights:
        with local.holding(weights):
            return sampler.pack(version)

    packs, shares = learner.sharded and plugins.engine.takes_shards, plugins.engine.shared and learner.ranks.count > 1
    ahead = Ahead(
        recipe.train.max_staleness,
        recipe.train.steps,
        learner,
        lend,
        player,
        on_row,
        on_end,
        pack if packs else None,
        Gate(learner.ranks) if shares else None,
    )
    stack.callback(ahead.close)
    return ahead


def _local_models(
    recipe: Recipe, student: Student, accelerator: Accelerator, ranks: Ranks, valid_vocab: int
) -> LocalModels:
    return LocalModels(
        student,
        ranks,
        recipe.train,
        recipe.teachers.ema if recipe.teachers is not None else EmaSettings(),
        accelerator.device,
        valid_vocab=valid_vocab,
        temperature=recipe.rollout.temperature,
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


def fleet_fingerprints(infos: dict[str, pb.TeacherInfo]) -> dict[str, Any]:
    """The description that each served model gave in the handshake, as JSON values, for the run folder."""
    return {name: MessageToDict(info, preserving_proto_field_name=True) for name, info in infos.items()}
