"""Builds and checks the parts of a job that need no weights: plug-ins, prompts and the connection to teachers."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opd.fleet.client import TeacherFleet
from opd.fleet.source import ScoreSource
from opd.tasks.build import build_prompts
from opd.tasks.source import PromptSource
from opd.tasks.stops import generation_stops, stop_set
from student.data.prompts import fit_prompts
from student.job.family_check import check_positions
from student.job.learns_early import learns_early
from student.job.plugins import Plugins, build_plugins
from student.job.prompt_check import check_contexts, check_prompts
from student.model.model import Weights, load_tokenizer
from student.model.ranks import launched_ranks
from student.plugin.controllers import Controller
from student.scoring.contexts import Contexts
from student.scoring.handshake import RunModels, shake_hands
from student.scoring.stops import StopMap, map_of
from student.settings.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts that are built and checked before the student is loaded.

    Attributes:
        recipe: the recipe of the job.
        plugins: terms, controllers, rewards, strategy and engine.
        weights: the location of the student's weights.
        tokenizer: the student's tokenizer.
        source: the prompts, within the length limit.
        fleet: the client of the teacher servers; None if the job uses no server.
        models: the result of the handshake.
        stop_ids: ids that end the student's responses.
        stops: maps each teacher's stop tokens onto `stop_ids`.
        contexts: renders the prompts that teachers and the reference read in place of the student's.
    """

    recipe: Recipe
    plugins: Plugins
    weights: Weights
    tokenizer: Any
    source: PromptSource
    fleet: ScoreSource | None
    models: RunModels
    stop_ids: Sequence[int]
    stops: StopMap
    contexts: Contexts

    @property
    def asks_ahead(self) -> bool:
        """Whether rows sampled ahead go to the models at once, or are only verified as the strategy may drop them."""
        return self.plugins.rewards.reads_signals or not self.plugins.strategy.traits.judges_first

    @property
    def learns_early(self) -> bool:
        """Whether the gradient of a step may begin before all of its scores have arrived."""
        return self.fleet is not None and learns_early(self.recipe, self.plugins)


def prepare(recipe: Recipe, stack: ExitStack, model_path: str | None, poll: Callable[[], None]) -> Prepared:
    """Build and check everything that does not need the student's weights, with the fastest checks first.

    Args:
        recipe: the job.
        stack: closes what was opened here.
        model_path: folder or hub id of the weights, in place of the recipe's model.path; None for those.
        poll: called repeatedly while waiting for the teachers; may raise to give up.
    """
    _set_up_torch(recipe)
    plugins = build_plugins(recipe)
    stack.callback(plugins.rewards.close)
    weights = Weights.of(recipe.model, model_path)
    tokenizer = load_tokenizer(weights.base, weights.revision)
    source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
    stack.callback(source.close)
    fit_prompts(recipe, source, tokenizer)
    check_prompts(recipe, plugins, source)
    check_model(plugins, weights)
    plugins.remarks.extend(check_positions(recipe, plugins, weights))
    fleet = connect(recipe, poll) if plugins.needs.served else None
    if fleet is not None:
        stack.callback(fleet.close)
    ending = generation_stops(weights.base, weights.revision)
    stop_ids = stop_set(tokenizer, ending, recipe.rollout.stop_tokens).ids
    models = shake_hands(fleet, recipe, plugins.needs, tokenizer, source, stop_ids)
    stops = map_of(recipe, stop_ids, models.alike, plugins.needs)
    contexts = Contexts(recipe.contexts, tokenizer, recipe.rollout.max_prompt_tokens)
    check_contexts(recipe, contexts, source, tokenizer)
    return Prepared(recipe, plugins, weights, tokenizer, source, fleet, models, stop_ids, stops, contexts)


def check_model(plugins: Plugins, weights: Weights) -> None:
    """Let methods look at the student without its weights; what cannot be built is refused when it is loaded.

    Raises:
        ConfigError: if a method cannot work with such a model.
    """
    looking = [one for one in plugins.controllers if type(one).check_model is not Controller.check_model]
    lm = weights.skeleton() if looking else None
    if lm is None:
        return
    for controller in looking:
        controller.check_model(lm)


def connect(recipe: Recipe, poll: Callable[[], None] | None = None) -> ScoreSource | None:
    """The client of the recipe's teachers; None if the recipe names no endpoints.

    Args:
        recipe: the job.
        poll: called repeatedly while waiting for servers; may raise to give up.

    Raises:
        UnavailableError: if no server answers within teachers.fleet.connect_seconds.
    """
    if recipe.teachers is None or not recipe.teachers.endpoints:
        return None
    ranks, fleet = launched_ranks(), recipe.teachers.fleet
    # The ranks of a run share the servers, and so each gets its part of the limit on tokens in flight.
    tokens = max(1, fleet.calls.in_flight_tokens // ranks)
    settings = fleet.model_copy(update={"calls": fleet.calls.model_copy(update={"in_flight_tokens": tokens})})
    name = _client_name(recipe.run, ranks)
    source = TeacherFleet.connect(recipe.teachers.endpoints, settings=settings, client=name, poll=poll)
    try:
        # Wait for all replicas: each must be checked against the run, and rows are compared between two of them.
        source.settle(poll=poll)
    except BaseException:
        source.close()
        raise
    return source


def _client_name(run: Path, ranks: int) -> str:
    """The name by which servers know this process, for fair queueing and logs: the run's folder, and the rank."""
    rank = f".{os.environ.get('RANK', '0')}" if ranks > 1 else ""
    return re.sub(r"[^A-Za-z0-9._-]", "-", run.name or "student")[: 64 - len(rank)] + rank


def _set_up_torch(recipe: Recipe) -> None:
    """Set torch's threads and seed for this process, and switch off progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    torch.manual_seed(recipe.seed)
