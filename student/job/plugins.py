"""Builds the plug-ins that a recipe names, with validated settings; imports no torch, so that typos fail at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opd.errors import ConfigError
from student.data.needs import STUDENT, TEACHER, Needs, merge, needs_of
from student.job.extras import check_extras
from student.job.remarks import remarks
from student.job.rules import Parts, refuse
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
    from student.job.evaluate import EvalMeasure
    from student.scoring.handshake import RunModels
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
    engine: RolloutEngine = ROLLOUT_ENGINES.make(recipe.rollout.engine, RolloutEngine, "rollout.engine")
    for plugin in parts:
        plugin.check(recipe, terms)
    together = Parts(recipe, terms, controllers, strategy, rewards, engine)
    refuse(together)
    _check_quantized(recipe, engine)
    check_extras(recipe, (*parts, engine))
    if needs.moe_routes and not engine.traits.records_moe_routes:
        raise ConfigError(
            f"rollout.engine {engine.settings.name} does not record which experts its tokens use; set rollout.engine "
            "to {name: transformers}, or source: old in method routing_replay."
        )
    engine.check(recipe, terms)
    if engine.settings.mismatch_rows:
        needs = replace(needs, models=needs.models | {STUDENT})
    return Plugins(terms, controllers, strategy, rewards, engine, needs, remarks(together))


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


def _check_quantized(recipe: Recipe, engine: RolloutEngine) -> None:
    """Refuse 4-bit weights where they do not work.

    Raises:
        ConfigError: naming the setting and why.
    """
    four = recipe.model.lora is not None and recipe.model.lora.quantize is not None
    if four and engine.traits.holds_weights:
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


def build_measure(models: RunModels, needs: Needs, settings: TeacherSettings | None) -> EvalMeasure | None:
    """The measure of evaluations against the teachers of a run; None if nothing can be measured.

    Args:
        models: the models of the run.
        needs: the needs of the objective.
        settings: the recipe's `teachers`.
    """
    from student.methods.distil.measure import reverse_kl_of

    return reverse_kl_of(models.infos, needs, settings, spans=bool(models.translators))
