"""Builds what samples the rows of a run: the rollout engine, the sampler of the loop, and what samples ahead."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from student.job.preparation import Prepared
from student.learning.learner import Learner
from student.rollout.ahead import Ahead, Gate, copy_of
from student.rollout.engine import (
    CopyEngine,
    EngineSetup,
    PackedWeights,
    RolloutEngine,
    RolloutEngineSettings,
    Shards,
)
from student.rollout.episodes import EpisodePlayer
from student.rollout.policy_sampler import PolicySampler
from student.rollout.requests import RolloutSpec
from student.run.space import Space
from student.scoring.local import LocalModels
from student.scoring.score import Scoring


def engine_setup(prepared: Prepared, learner: Learner, candidates: int, space: Space | None) -> EngineSetup:
    """What the engine of a run is opened with.

    Args:
        prepared: the parts of the run that need no weights.
        learner: has the student.
        candidates: number of the student's most likely ids per position to keep.
        space: waits if a disk that the engine writes to is full; None to end the run.
    """
    recipe, needs = prepared.recipe, prepared.plugins.needs
    vocabulary, keep_ids = len(prepared.tokenizer), prepared.stops.ids
    spec = RolloutSpec(
        seed=recipe.seed,
        batch_rows=recipe.rollout.batch_rows,
        candidates=min(candidates, vocabulary),
        valid_vocab=vocabulary,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        stop_ids=frozenset(prepared.stop_ids),
        stop_texts=tuple(recipe.rollout.stop),
        cache_tokens=recipe.rollout.cache_tokens,
        autocast=torch.bfloat16 if learner.accelerator.mixed_precision == "bf16" else None,
        # `most_likely` must return more ids than it is made to keep; `map_of` has refused teachers asked at too few.
        keep_ids=keep_ids if candidates > len(keep_ids) else (),
        read_given=bool(needs.signals or needs.reward or candidates),
        moe_routes=needs.moe_routes,
    )
    shards = Shards(learner.student, learner.ranks, str(recipe.run.absolute())) if learner.sharded else None
    weights = prepared.weights
    return EngineSetup(learner.student.lm, prepared.tokenizer, spec, weights.base, weights.revision, shards, space)


def open_sampler(prepared: Prepared, setup: EngineSetup, learner: Learner, stack: ExitStack) -> PolicySampler:
    """Open the engine of the recipe; the sampler through which all rollouts of the loop go."""
    engine = prepared.plugins.engine
    engine.open(setup)
    stack.callback(engine.close)
    player = EpisodePlayer(prepared.recipe.rollout.episodes, setup.tokenizer, setup.spec)
    stack.callback(player.close)
    beside = bool(prepared.recipe.train.max_staleness) and engine.traits.holds_weights
    return PolicySampler(engine, learner, player, beside=beside)


def open_ahead(
    prepared: Prepared,
    setup: EngineSetup,
    sampler: PolicySampler,
    learner: Learner,
    scorer: Scoring,
    local: LocalModels,
    twin: PreTrainedModel | None,
    stack: ExitStack,
) -> Ahead | None:
    """What samples ahead: the engine if it holds weights, or one on a copy; None if `train.max_staleness` is 0.

    Args:
        prepared: the parts of the run that need no weights.
        setup: what the engine was opened with.
        sampler: the sampler of the loop.
        learner: gives the weights and the ranks.
        scorer: gets each row, in the sampling thread, as soon as it is finished.
        local: the models in this process, which lend the weights that a step is sampled with.
        twin: an unsharded copy of a sharded student; None to copy the student.
        stack: closes what is opened here.
    """
    train, engine = prepared.recipe.train, prepared.plugins.engine
    if not train.max_staleness:
        return None
    tokenizer = copy.deepcopy(setup.tokenizer)  # a fast tokenizer must not be used by two threads at once
    own: RolloutEngine | None = None
    if not engine.traits.holds_weights:
        own = CopyEngine(RolloutEngineSettings(name="copy"))
        model = (twin or copy_of(setup.model)).to(learner.accelerator.device)
        own.open(replace(setup, model=model, tokenizer=tokenizer, shards=None))

    def lend() -> AbstractContextManager[RolloutEngine]:
        return sampler.lend() if own is None else nullcontext(own)

    def pack(weights: Mapping[str, Tensor], version: int) -> PackedWeights:
        with local.kept.holding(weights):
            return sampler.pack(version)

    player = EpisodePlayer(prepared.recipe.rollout.episodes, tokenizer, setup.spec)
    stack.callback(player.close)
    packs, shares = learner.sharded and engine.traits.takes_shards, engine.traits.shared and learner.ranks.count > 1
    ahead = Ahead(
        train.max_staleness,
        train.steps,
        learner,
        lend,
        player,
        # Rows that the strategy may still drop are only verified ahead; models score the rows that it keeps.
        scorer.ask if prepared.asks_ahead else scorer.verify,
        scorer.flush,
        asks=prepared.asks_ahead,
        pack=pack if packs else None,
        gate=Gate(learner.ranks) if shares else None,
    )
    stack.callback(ahead.close)
    return ahead
