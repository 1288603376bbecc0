"""Builds the plug-ins that a recipe names, with validated settings; imports no torch, so that typos fail at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opd.errors import ConfigError
from student.data.needs import STUDENT, TEACHER, Needs, merge, needs_of
from student.plugin.base import Plugin
from student.plugin.controllers import CONTROLLERS, Controller
from student.plugin.strategy import STRATEGIES, Strategy
from student.plugin.terms import Term, build_terms
from student.rl import REWARDS
from student.rollout.engine import ROLLOUT_ENGINES, RolloutEngine
from student.scoring.contexts import reads_outcomes
from student.scoring.rewards.base import Reward
from student.scoring.rewards.chain import RewardChain
from student.settings.recipe import Recipe

if TYPE_CHECKING:
    from opd.wire.v1 import teacher_pb2 as pb
    from student.job.evaluate import EvalMeasure
    from student.settings.teachers import TeacherSettings


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plug-ins of a recipe.

    Attributes:
        terms: the terms of the objective.
        controllers: the methods that steer the loop.
        strategy: the rollout strategy.
        rewards: the rewards of rows.
        engine: the rollout engine.
        needs: the merged needs of terms, controllers, strategy and rewards.
        remarks: warnings about settings that are valid but may not do what is expected.
    """

    terms: list[Term]
    controllers: list[Controller]
    strategy: Strategy
    rewards: RewardChain
    engine: RolloutEngine
    needs: Needs
    remarks: list[str]


def build_plugins(recipe: Recipe) -> Plugins:
    """Instantiate the plug-ins of a recipe.

    Raises:
        ConfigError: for unknown names or settings, or a combination that cannot work.
    """
    terms = build_terms(recipe.objective)
    controllers = [CONTROLLERS.make(entry, Controller, f"methods.{i}") for i, entry in enumerate(recipe.methods)]
    _check_once(controllers)
    strategy: Strategy = STRATEGIES.make(recipe.rollout.strategy, Strategy, "rollout.strategy")
    rewards = RewardChain([REWARDS.make(entry, Reward, f"rewards.{i}") for i, entry in enumerate(recipe.rewards)])
    parts = (*terms, *controllers, strategy, *rewards.parts)
    needs = merge([needs_of(part) for part in parts], temperature=recipe.rollout.temperature)
    # Rewards are used by terms, or by contexts that quote the outcome of a row.
    told = any(reads_outcomes(role, context) for role, context in recipe.contexts.items())
    if rewards.parts and not told and not any(part.needs().reward for part in (*terms, *controllers)):
        raise ConfigError("rewards are set, but no term learns from them; add a term that does, for example grpo.")
    needs = _with_contexts(recipe, parts, needs)
    # "any" is satisfied by a reward that replaces the verdict; without one, the verdict is the reward.
    if needs.reward == "any" and rewards.whole is None:
        needs = replace(needs, reward="verdict")
    if needs.served and recipe.teachers is None:
        raise ConfigError(
            "the objective needs a teacher; set teachers.endpoints, or use an objective that learns from rewards."
        )
    _check_teachers(recipe, terms, controllers, strategy)
    _check_given(terms, controllers, strategy)
    for term in terms:
        _check_own_weights(recipe, term)
    for plugin in parts:
        plugin.check(recipe, terms)
    rewards.check_range(terms)
    engine: RolloutEngine = ROLLOUT_ENGINES.make(recipe.rollout.engine, RolloutEngine, "rollout.engine")
    _check_summaries(recipe, controllers, strategy)
    _check_staleness(recipe, terms, controllers, strategy, engine)
    _check_quantized(recipe, engine)
    if needs.moe_routes and not engine.records_moe_routes:
        raise ConfigError(
            f"rollout.engine {engine.settings.name} does not record which experts its tokens use; set rollout.engine "
            "to {name: transformers}, or source: old in method routing_replay."
        )
    engine.check(recipe, terms)
    if engine.settings.mismatch_rows:
        needs = replace(needs, models=needs.models | {STUDENT})
    remarks = [remark for part in parts for remark in part.remarks(recipe, terms)]
    remarks += [
        *_uncertain((*terms, *controllers, strategy, *rewards.parts)),
        *_other_temperatures(terms, recipe.rollout.temperature),
        *_rounded(recipe),
        *_noisy(recipe),
    ]
    return Plugins(terms, controllers, strategy, rewards, engine, needs, remarks)


def _check_once(controllers: Sequence[Controller]) -> None:
    """Refuse a method that is listed twice: both would write the same metrics, notes and tags.

    Raises:
        ConfigError: naming it.
    """
    kinds = [type(controller) for controller in controllers]
    for controller in controllers:
        if kinds.count(type(controller)) > 1:
            raise ConfigError(f"method {controller.settings.name!r} is named twice; keep one of them.")


def _check_given(terms: Sequence[Term], controllers: Sequence[Controller], strategy: Strategy) -> None:
    """Refuse a term that learns from given rows alone where nothing gives any, or that cannot learn from given ones.

    Raises:
        ConfigError: naming the term.
    """
    bare = (part.settings.name for part in controllers if part.gives_answers and not part.gives_log_probs)
    answering = next(bare, None)
    for term in terms if answering is not None else ():
        chain = getattr(term, "chain", None)
        reading = [] if chain is None else [part.settings.name for part in chain.reading("behaviour")]
        if term.settings.rows != "sampled" and (reading or getattr(term, "reads_behaviour", False)):
            what = f"advantage {reading[0]!r}" if reading else "its importance ratio"
            raise ConfigError(
                f"term {term.settings.name!r} has rows: {term.settings.rows} and would learn from the given answers "
                f"of method {answering}, which have no log-probs under a policy that sampled them, while {what} needs "
                "these; set rows: sampled, or use objective rl_plus, or ratio: none with another advantage."
            )
    giving = [f"method {controller.settings.name}" for controller in controllers if controller.gives_answers]
    giving += [f"rollout.strategy {strategy.settings.name}"] if strategy.gives_rows else []
    for term in terms:
        if giving and term.settings.rows != "sampled" and not term.takes_given:
            what, other = "estimates from the sampled token", ""
            if hasattr(term.settings, "payload"):
                what, other = f"has payload {term.settings.payload}", ", or use payload gather or hidden"
            raise ConfigError(
                f"term {term.settings.name!r} {what}, which needs rows that the student sampled, but {giving[0]} adds "
                f"others; set its rows to sampled{other}."
            )
        if not giving and term.settings.rows == "expert":
            raise ConfigError(
                f"term {term.settings.name!r} learns from given rows only, and nothing gives any; add method "
                "expert_rows, or let the plug-in that gives them declare it (gives_answers of a method, gives_rows of "
                "a strategy)."
            )


def _check_own_weights(recipe: Recipe, term: Term) -> None:
    """Refuse a term with parameters of its own if the student is sharded: nothing would average their gradients.

    Raises:
        ConfigError: naming the term.
    """
    if recipe.train.sharding != "none" and type(term).module is not Term.module:
        raise ConfigError(
            f"term {term.settings.name!r} trains weights of its own, which cannot be sharded; set train.sharding: none."
        )


def _with_contexts(recipe: Recipe, parts: Sequence[Term | Controller | Strategy | Reward], needs: Needs) -> Needs:
    """`needs`, with rewards added if a context is made from them.

    Raises:
        ConfigError: for a context that would change the old policy, or a context made from rewards that in turn depend
            on the answers of models.
    """
    outcomes = sorted(role for role, context in recipe.contexts.items() if reads_outcomes(role, context))
    for part in parts:
        mine, name = part.needs(), part.settings.name
        teaches = getattr(part.settings, "role", TEACHER) == STUDENT
        old = STUDENT in mine.models or (not teaches and any(need.role == STUDENT for need in mine.signals))
        if STUDENT in recipe.contexts and old:
            raise ConfigError(
                f"contexts.student would change the log-probs of the old policy, which {name} needs from the student; "
                "use the context for another role, for example ema or teacher."
            )
        if outcomes and isinstance(part, Reward) and mine.signals:
            raise ConfigError(
                f"contexts.{outcomes[0]} is made from rewards, but reward {name!r} is computed from the models' "
                "scores, which come later; remove one of them."
            )
    if outcomes and not needs.reward:
        return replace(needs, reward="any")
    return needs


def _uncertain(parts: Sequence[object]) -> Iterator[str]:
    """A warning for every plug-in, and every advantage of a term, whose formula its paper's text does not give."""
    inner = [one for part in parts for one in getattr(getattr(part, "chain", None), "parts", ())]
    how = {"abstract": "built from the abstract of its paper", "inferred": "inferred from what others say of its paper"}
    for part in (*parts, *inner):
        if grade := how.get(getattr(part, "evidence", "")):
            yield f"the formula of {part.settings.name} is {grade}, so results may differ from the paper's"


def _other_temperatures(terms: Sequence[Term], sampled_at: float) -> Iterator[str]:
    """A warning for every model whose temperature differs from that of the student it is compared with."""
    for term in terms:
        signals = [need for need in term.needs().signals if need.temperature is not None]
        found = {(need.role, need.temperature or 0.0, need.student_temperature or sampled_at) for need in signals}
        for role, temperature, own in sorted(found):
            if temperature != own:
                yield (
                    f"{term.settings.name} compares the student at temperature {own:g} with the {role} at temperature "
                    f"{temperature:g}, so it learns that difference too; rollout.temperature is {sampled_at:g}."
                )


def _rounded(recipe: Recipe) -> Iterator[str]:
    """A warning if trained weights have low precision; adapters are float32 over any base."""
    if recipe.model.dtype != "float32" and recipe.model.lora is None:
        yield (
            f"model.dtype {recipe.model.dtype} rounds the trained weights after every update, which loses most of the "
            f"update at small learning rates (train.learning_rate {recipe.train.learning_rate:g}); set it to float32, "
            "with train.mixed_precision: bf16 for speed, or train adapters (model.lora)."
        )


def _noisy(recipe: Recipe) -> Iterator[str]:
    """What dropout while learning does to ratios and losses."""
    if recipe.model.dropout:
        yield (
            "model.dropout is true: where the model's config has dropout or router noise, the student learns another "
            "distribution than it samples from, so that importance ratios of fresh tokens are not 1; the metrics "
            "mismatch/* show by how much, and rollout.engine.mismatch_limit counts it as well."
        )


def _check_staleness(
    recipe: Recipe,
    terms: Sequence[Term],
    controllers: Sequence[Controller],
    strategy: Strategy,
    engine: RolloutEngine,
) -> None:
    """Refuse `train.max_staleness` where something in the recipe cannot work with it.

    Raises:
        ConfigError: naming it and why.
    """
    steps = recipe.train.max_staleness
    # Only the loop's thread may use collectives; with two threads, ranks could pair them wrongly.
    if steps and recipe.train.sharding != "none" and engine.takes_shards and not engine.packs:
        raise ConfigError(
            f"train.max_staleness is {steps}, but rollout.engine {engine.settings.name} gathers the weights of a "
            "sharded student from all ranks at once, which it cannot do while the student learns; set "
            "train.max_staleness: 0, rollout.engine to {name: transformers} or servers, or train.sharding: none."
        )
    parts: list[Term | Controller | Strategy] = [*terms, *controllers, strategy] if steps else []
    for part in parts:
        if part.why_not_stale:
            raise ConfigError(
                f"train.max_staleness is {steps}, but {part.settings.name} does not work with it: "
                f"{part.why_not_stale}; or set train.max_staleness: 0."
            )
    giving = next((part.settings.name for part in controllers if part.gives_answers), None)
    if steps and engine.holds_weights and giving is not None:
        raise ConfigError(
            f"rollout.engine {engine.settings.name} has weights of its own and leaves the given answers of {giving} "
            "to the student itself, which learns while train.max_staleness samples; set train.max_staleness: 0, or "
            "rollout.engine to {name: transformers}."
        )


def _check_summaries(recipe: Recipe, controllers: Sequence[Controller], strategy: Strategy) -> None:
    """Refuse episodes that the student summarises where something in the recipe cannot work with it.

    Raises:
        ConfigError: naming it and why.
    """
    parts: list[Plugin] = [*controllers, strategy] if recipe.rollout.episodes.summarised else []
    for part in parts:
        if why := part.against_summaries():
            raise ConfigError(
                f"rollout.episodes.history is summary, but {part.settings.name} does not work with it: {why}; or set "
                "history to a number of turns, or to null."
            )


def _check_quantized(recipe: Recipe, engine: RolloutEngine) -> None:
    """Refuse 4-bit weights where they do not work, and them and 8-bit moments where bitsandbytes is missing.

    Raises:
        ConfigError: naming the setting and why.
    """
    four = recipe.model.lora is not None and recipe.model.lora.quantize is not None
    eight = recipe.train.optimizer == "adamw_8bit"
    if four and engine.holds_weights:
        raise ConfigError(
            f"rollout.engine {engine.settings.name} holds weights of its own and would sample from the base as stored "
            "on disk, not from the 4-bit base that is trained over (model.lora.quantize); set rollout.engine to "
            "{name: transformers}, or quantize to null."
        )
    if four and recipe.train.sharding == "fsdp":
        raise ConfigError(
            "model.lora.quantize stores blocks of codes with scales, which train.sharding fsdp cannot split into rows "
            "as it does the weights; set train.sharding: none, or remove model.lora.quantize."
        )
    for asked, key in ((four, "model.lora.quantize"), (eight, "train.optimizer adamw_8bit")):
        if asked and importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                f"{key} needs bitsandbytes, which is not installed; install it with pip install 'opd[quantized]'."
            )


def _check_teachers(
    recipe: Recipe, terms: Sequence[Term], controllers: Sequence[Controller], strategy: Strategy
) -> None:
    """Refuse a sum over several teachers if something in the recipe supports only one teacher per row.

    Raises:
        ConfigError: naming it.
    """
    if recipe.teachers is None or not recipe.teachers.sums_divergences:
        return
    summing = [term for term in terms if not term.sums_teachers]
    parts: list[Term | Controller | Strategy] = [*summing, *controllers, strategy]
    for part in parts:
        if part.needs().teacher:
            raise ConfigError(
                f"{part.settings.name} cannot learn from several teachers of one row with teachers.combine: "
                "divergence; set it to probability, or route each prompt to one teacher."
            )


def build_measure(
    infos: Mapping[str, pb.TeacherInfo], needs: Needs, settings: TeacherSettings | None
) -> EvalMeasure | None:
    """The measure of evaluations against the teachers of a run; None if nothing can be measured.

    Args:
        infos: the served models.
        needs: the needs of the objective.
        settings: the recipe's `teachers`.
    """
    from student.methods.distil.measure import reverse_kl_of

    return reverse_kl_of(infos, needs, settings)
