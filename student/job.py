"""A job: everything a run needs, built and checked from a recipe before the first step."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from google.protobuf.json_format import MessageToDict

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.fleet.membership.discovery import recorded_folder
from opd.fleet.source import ScoreSource
from opd.tasks.build import build_prompts
from opd.tasks.source import PromptSource
from opd.tasks.stops import generation_stops, stop_set
from opd.wire.v1 import teacher_pb2 as pb
from student.controllers import Controller
from student.data.cursor import PromptCursor
from student.data.prompts import fit_prompts
from student.data.row import Row
from student.learning.learner import Learner
from student.learning.model import Student, load_student, load_tokenizer
from student.learning.objective import Objective
from student.learning.ranks import Ranks, make_accelerator
from student.methods.distil.opd import OnPolicyDistillation, OpdSettings
from student.methods.windows.probe import Prober
from student.plugins import build_plugins
from student.recipe import EmaSettings, Recipe, TeacherSettings
from student.rl.rewards.chain import RewardChain
from student.rollout.engine import EngineSetup, Sampler
from student.rollout.episodes import EpisodePlayer
from student.rollout.spec import RolloutSpec
from student.rollout.strategy import Strategy
from student.scoring.contexts import Contexts
from student.scoring.handshake import Scoring, shake_hands
from student.scoring.local import LocalModels
from student.scoring.needs import Needs, merge
from student.scoring.prompt_check import check_contexts, check_prompts
from student.scoring.score import Scorer
from student.scoring.stop_probe import StopProbe
from student.scoring.stops import StopMap, map_of
from student.scoring.verify import Verification
from student.services import LoopServices

_MEASURED_IDS = 64


@dataclass(slots=True)
class Job:
    """The parts of a run; see the classes for what each does."""

    recipe: Recipe
    accelerator: Accelerator
    fleet: ScoreSource | None
    models: Scoring
    source: PromptSource
    tokenizer: Any
    learner: Learner
    cursor: PromptCursor
    strategy: Strategy
    sampler: Sampler
    scorer: Scorer
    local: LocalModels
    controllers: list[Controller]
    rewards: RewardChain
    services: LoopServices
    stop_probe: StopProbe | None


def connect(recipe: Recipe) -> ScoreSource | None:
    """The fleet of the recipe; None when it names no endpoints.

    Raises:
        UnavailableError: when no server answers within teachers.fleet.connect_seconds.
    """
    if recipe.teachers is None or not recipe.teachers.endpoints:
        return None
    return TeacherFleet.connect(recipe.teachers.endpoints, settings=recipe.teachers.fleet)


def kl_term_for(
    infos: dict[str, pb.TeacherInfo], needs: Needs, settings: TeacherSettings | None
) -> OnPolicyDistillation | None:
    """The term that measures reverse KL in evaluations: exact where every teacher serves hidden states.

    None where it cannot be measured: without a teacher, or from a store, which has no scores of new samples.
    """
    if settings is None or recorded_folder(settings.endpoints) is not None:
        return None
    if not needs.teacher:
        return None
    kinds = [set(info.payloads) for info in infos.values()]
    payload = "sampled"
    mixed = settings.map_stops or (settings.combine == "probability" and settings.several)
    if not mixed and all(pb.PAYLOAD_KIND_HIDDEN in served for served in kinds):
        payload = "hidden"
    elif all(pb.PAYLOAD_KIND_GATHER in served for served in kinds):
        payload = "gather"
    # Rows carry one set of candidates, so the measurement asks at as many ids as the objective does.
    k = needs.candidates or min([_MEASURED_IDS, *(info.limits.max_k for info in infos.values())])
    return OnPolicyDistillation(parse_settings(OpdSettings, {"name": "opd", "payload": payload, "k": k}))


def build_job(recipe: Recipe, stack: ExitStack, *, model_path: str | None = None, poll: Callable[[], None]) -> Job:
    """Build the job in the order that fails fastest: plug-ins, prompts, fleet, handshake, model.

    Args:
        recipe: the recipe.
        stack: closes what the job opened.
        model_path: weights to load instead of the recipe's, for a resumed run.
        poll: called while waiting for the fleet.
    """
    _set_up_torch(recipe)
    plugins = build_plugins(recipe)
    source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
    stack.callback(source.close)
    path, revision = (model_path, None) if model_path else (recipe.model.path, recipe.model.revision)
    fit_prompts(recipe, source, load_tokenizer(path, revision))
    check_prompts(recipe, plugins.needs, source)
    fleet = connect(recipe) if plugins.needs.served else None
    if fleet is not None:
        stack.callback(fleet.close)
    models = shake_hands(fleet, recipe, plugins.needs, load_tokenizer(path, revision), source)
    accelerator = _accelerator(recipe, stack)
    student, tokenizer = load_student(
        path,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        revision=revision,
    )

    local = _local_models(recipe, student, accelerator, len(tokenizer))
    verification = Verification(source, recipe.rollout.verify_workers)
    stack.callback(verification.close)
    stack.callback(plugins.rewards.close)
    stop_ids = stop_set(tokenizer, generation_stops(path, revision), recipe.rollout.stop_tokens).ids
    stop_map = map_of(recipe, stop_ids, models.infos, plugins.needs)
    contexts = Contexts(recipe.contexts, tokenizer, recipe.rollout.max_prompt_tokens)
    check_contexts(recipe, contexts, source, tokenizer)

    def reward(rows: Sequence[Row]) -> None:
        plugins.rewards.apply(rows, services)

    def scorer_of(needs: Needs, stops: StopMap = stop_map) -> Scorer:
        return Scorer(
            fleet,
            recipe.teachers,
            needs,
            verification,
            accelerator.device,
            known=models.infos,
            local=local,
            contexts=contexts,
            stops=stops,
            reward=reward,
        )

    objective = Objective(plugins.terms, recipe.rollout.max_new_tokens)
    objective.bind(tokenizer)
    scorer = scorer_of(plugins.needs)
    learner = Learner(
        student,
        objective,
        plugins.needs,
        recipe.train,
        accelerator,
        valid_vocab=len(tokenizer),
        temperature=recipe.rollout.temperature,
        head_of=scorer.head_of,
    )
    kl_term = kl_term_for(models.infos, plugins.needs, recipe.teachers)
    measured = [] if kl_term is None else [kl_term.needs()]
    kl_needs = merge(measured, temperature=recipe.rollout.temperature)
    kl_scorer = scorer_of(kl_needs) if kl_term is not None else None
    spec = RolloutSpec(
        seed=recipe.seed,
        batch_rows=recipe.rollout.batch_rows,
        candidates=min(max(plugins.needs.candidates, kl_needs.candidates), len(tokenizer)),
        valid_vocab=len(tokenizer),
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        stop_ids=frozenset(stop_ids),
        keep_ids=stop_map.ids if max(plugins.needs.candidates, kl_needs.candidates) > len(stop_map.ids) else (),
    )
    engine = plugins.engine
    engine.open(EngineSetup(student.lm, tokenizer, spec, path, revision))
    stack.callback(engine.close)
    player = EpisodePlayer(recipe.rollout.episodes, tokenizer, spec)
    stack.callback(player.close)
    sampler, cursor = Sampler(engine, learner, player), PromptCursor(source)
    # A scorer of its own, because it is used from the probe's thread.
    prober = Prober(learner, sampler, scorer_of(plugins.needs), poll)
    stack.callback(prober.close)
    services = LoopServices(
        recipe,
        learner,
        tokenizer,
        source,
        scorer,
        sampler,
        kl_scorer,
        kl_term,
        poll,
        prober,
        local,
        cursor,
        verification,
    )
    live = fleet is not None and not fleet.recorded and plugins.needs.teacher
    probe = StopProbe(recipe, sampler, source, models.infos, stop_ids, scorer_of) if live and models.infos else None
    return Job(
        recipe=recipe,
        accelerator=accelerator,
        fleet=fleet,
        models=models,
        source=source,
        tokenizer=tokenizer,
        learner=learner,
        cursor=cursor,
        strategy=plugins.strategy,
        sampler=sampler,
        scorer=scorer,
        local=local,
        controllers=plugins.controllers,
        rewards=plugins.rewards,
        services=services,
        stop_probe=probe,
    )


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
